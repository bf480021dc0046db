"""The processes of this node: ranks, their monitors, the process that forks ranks, and health checks."""
