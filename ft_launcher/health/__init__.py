"""Health checks of this node before a cycle, each in a process of its own (`check.CHECKS`)."""
