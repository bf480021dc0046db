"""Health of this node before a cycle: one check per file, each in a process of its own."""
