"""Storage paths must answer: a folder takes a small file and gives it back, a file can be read.

Runs in a process of its own; a path that hangs is the last one it named.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ft_launcher.health.finding import Answer, Finding, Task

_BYTES = 4096


def look(task: Task) -> Answer:
    """One finding per path of `task.work["paths"]`; in order, so the first that hangs hides those after it."""
    findings = []
    for path in task.work["paths"]:
        task.say(path)
        findings.append(_try(Path(path)))
    return findings, {}


def _try(path: Path) -> Finding:
    try:
        if not path.is_dir():
            with path.open("rb") as file:
                file.read(_BYTES)
            return "ok", ""
        return ("ok", "") if _gives_back(path) else ("unhealthy", f"{path}: what was read is not what was written")
    except OSError as error:
        hint = " (name a file in it to have it only read)" if error.errno in (errno.EACCES, errno.EROFS) else ""
        return "unhealthy", f"{path}: {error.strerror}{hint}"


def _gives_back(folder: Path) -> bool:
    """Writes, reads and removes a file in the folder; whether the same bytes came back."""
    path = folder / f".ft_health_{os.urandom(8).hex()}"
    written = os.urandom(_BYTES)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, written)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache would answer
        return os.pread(file, _BYTES, 0) == written
    finally:
        os.close(file)
        path.unlink()
