"""Checks storage: paths that must answer, and free space in the folders that are written to.

Paths: a small file is written to a folder and read back; a file is read. This runs in a process of its own; if a path
hangs, it is the last one that the process named.
Space: in /dev/shm, which the training needs, and in the temporary and log folder, which only the launcher needs. The
agent reads local ones itself: asking a local file system for its size costs microseconds and cannot hang.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ft_launcher.health.check import Answer, Finding, State, Task

# One page: enough to have the storage answer.
_BYTES = 4096
_MIB = 1 << 20


def look(task: Task) -> Answer:
    """One finding per path of `task.work["paths"]`; in order, so the first that hangs hides those after it."""
    findings = []
    for path in task.work["paths"]:
        task.say(path)
        findings.append(_try(Path(path)))
    return findings, {}


def look_at_space(task: Task) -> Answer:
    """One finding per folder of `task.work["folders"]`, none of which the training needs."""
    findings = []
    for folder in task.work["folders"]:
        task.say(folder)
        findings.append(free_space(folder, needed=False))
    return findings, {}


def free_space(folder: str, needed: bool) -> Finding:
    """The free space of a folder: full when less than a MiB and less than 1 % is free, or no inode is.

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
    # Blocks that are reserved for root count as free for root only.
    free = found.f_frsize * (found.f_bfree if os.geteuid() == 0 else found.f_bavail)
    if free < _MIB and free * 100 < found.f_frsize * found.f_blocks:
        return full, f"{folder} is full: {free} bytes are free"
    if found.f_files and not found.f_favail:
        return full, f"{folder} is full: no inode is free"
    return "ok", f"{folder} has {free // _MIB} MiB free"


def _try(path: Path) -> Finding:
    try:
        if not path.is_dir():
            with path.open("rb") as file:
                file.read(_BYTES)
            return "ok", ""
        if _gives_back(path):
            return ("ok", "")
        return ("unhealthy", f"{path}: what was read is not what was written")
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS):
            hint = " (name a file in it to have it only read)"
        else:
            hint = ""
        return "unhealthy", f"{path}: {error.strerror}{hint}"


def _gives_back(folder: Path) -> bool:
    """Writes, reads and removes a file in the folder. Returns whether the same bytes were read."""
    path = folder / f".ft_health_{os.urandom(8).hex()}"
    written = os.urandom(_BYTES)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, written)
        # Pages that are not written yet cannot be dropped from the cache.
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache would answer
        return os.pread(file, _BYTES, 0) == written
    finally:
        os.close(file)
        path.unlink()
