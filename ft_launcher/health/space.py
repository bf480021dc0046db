"""Room in /dev/shm, which the training needs, and in the temporary and log folder, which only the launcher needs.

The agent reads local ones itself: asking a local file system for its size costs microseconds and cannot hang.
"""

from __future__ import annotations

import os

from ft_launcher.health.finding import Answer, Finding, State, Task

_MIB = 1 << 20


def look(task: Task) -> Answer:
    """One finding per folder of `task.work["folders"]`, none of which the training needs."""
    findings = []
    for folder in task.work["folders"]:
        task.say(folder)
        findings.append(room(folder, needed=False))
    return findings, {}


def room(folder: str, needed: bool) -> Finding:
    """Full when less than a MiB and less than 1 % is free, or no inode is.

    A full folder is a reason to leave the job where the training needs it. A full disk of logs is none: checkpoints
    lie elsewhere, and another node would write to the same disk of logs as often as not.
    """
    full: State = "unhealthy" if needed else "warning"
    try:
        found = os.statvfs(folder)
    except FileNotFoundError:
        return "not present", f"{folder} is not there"
    except OSError as error:
        return "unknown", f"{folder}: {error.strerror}"
    free = found.f_frsize * (found.f_bfree if os.geteuid() == 0 else found.f_bavail)
    if free < _MIB and free * 100 < found.f_frsize * found.f_blocks:
        return full, f"{folder} is full: {free} bytes are free"
    if found.f_files and not found.f_favail:
        return full, f"{folder} is full: no inode is free"
    return "ok", f"{folder} has {free // _MIB} MiB free"
