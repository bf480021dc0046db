"""Room in the folders that every job needs: its temporary and log folder, and /dev/shm.

The agent reads local ones itself: asking a local file system for its size costs microseconds and cannot hang.
"""

from __future__ import annotations

import os

from ft_launcher.health.finding import Answer, Finding, Task

_MIB = 1 << 20


def look(task: Task) -> Answer:
    """One finding per folder of `task.work["folders"]`."""
    findings = []
    for folder in task.work["folders"]:
        task.say(folder)
        findings.append(room(folder))
    return findings, {}


def room(folder: str) -> Finding:
    """Unhealthy when less than a MiB and less than 1 % is free, or no inode is."""
    try:
        found = os.statvfs(folder)
    except FileNotFoundError:
        return "not present", f"{folder} is not there"
    except OSError as error:
        return "unknown", f"{folder}: {error.strerror}"
    free = found.f_frsize * (found.f_bfree if os.geteuid() == 0 else found.f_bavail)
    if free < _MIB and free * 100 < found.f_frsize * found.f_blocks:
        return "unhealthy", f"{folder} is full: {free} bytes are free"
    if found.f_files and not found.f_favail:
        return "unhealthy", f"{folder} is full: no inode is free"
    return "ok", f"{folder} has {free // _MIB} MiB free"
