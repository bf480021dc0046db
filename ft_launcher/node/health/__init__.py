"""Health checks of this node before a cycle and while one runs, each in a process of its own (`check.CHECKS`), except
free space on local file systems; and the wait for GPU memory.
"""
