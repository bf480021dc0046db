"""Decides which files in /dev/shm were left by dead processes of this job and may be removed.

Pure. A library that shares memory by files removes these files when its process ends. It cannot do so when SIGKILL ends
the process: each restart then leaves less room in /dev/shm, in the end none. `shared_memory_cleanup.py` reads the facts
that are decided on here, and removes the files.

A file is removed only if all of this holds:
- its name is one that a library gives to its files (`NAMES`). Checkpoints and data sets have other names, and are never
  looked at,
- the pid in its name is that of a process that this launcher has reaped, and the file was made while that process lived
  (`candidates`),
- no living process has the file open or mapped, and every process that could be asked was asked (`removable`).
"""

from __future__ import annotations

import re
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rank_monitor.contract.memory_room import size_in_words

NAMES = {
    # aten/src/ATen/MapAllocator.cpp, `NewProcessWideShmHandle`: pid, random number, and (since 1.9) a counter. Tensors
    # of the sharing strategy "file_system" and the counters of CUDA's IPC have such a file until they are freed, those
    # of "file_descriptor" for a moment.
    "torch": re.compile(r"torch_([1-9]\d{0,9})_\d{1,10}(?:_\d{1,20})?"),
    # Lib/multiprocessing/heap.py, `Arena`: pid, and eight characters of `tempfile`; removed right after it is made.
    "Python's multiprocessing": re.compile(r"pym-([1-9]\d{0,9})-[a-z0-9_]{8}"),
}
"""Library -> the names of its files, with the pid of the process that made them.

Names without a pid tell nobody whose the file is, so these stay: `nccl-XXXXXX` of NCCL, `psm_XXXXXXXX` of Python's
`multiprocessing.shared_memory`, `sem.mp-XXXXXXXX` of its semaphores. Gloo makes no files here.
"""
_MAX_LISTED = 5
"""Files in the line about them: with data loaders there may be thousands."""


@dataclass(frozen=True)
class ReapedProcess:
    """A process that this launcher reaped. It can have made files from `began` to `ended` (seconds of wall time)."""

    began: float
    ended: float


@dataclass(frozen=True)
class SharedFile:
    """A file in /dev/shm: `mode` as of stat(2), `size` in bytes of memory, `changed_at` in seconds of wall time."""

    name: str
    mode: int
    uid: int
    size: int
    inode: int
    changed_at: float


@dataclass(frozen=True)
class ProcessView:
    """What /proc says of a process that may have opened the files in question.

    Attributes:
        holds: the names of these files that the process has open or mapped; None: this cannot be read, so the process
            may have any of them.
        sees_folder: whether the process is in another pid namespace and has the folder mounted. A file's name may then
            have a pid of that namespace. True where this cannot be read.
    """

    pid: int
    holds: frozenset[str] | None = frozenset()
    sees_folder: bool = False


def maker_of(name: str) -> int | None:
    """Returns the pid in the name of a library's file; None for all other names."""
    for pattern in NAMES.values():
        match = pattern.fullmatch(name)
        if match is not None:
            return int(match[1])
    return None


def candidates(files: Iterable[SharedFile], ended: Mapping[int, ReapedProcess], uid: int) -> list[SharedFile]:
    """Returns the regular files of user `uid` whose names and times are those of processes that were reaped.

    Args:
        files: what is in the folder.
        ended: the reaped processes by pid. Pids are used again, so a file counts only if it was changed while the
            reaped process lived.
        uid: the user of this launcher.
    """
    found = []
    for file in files:
        maker = maker_of(file.name)
        if maker is None or file.uid != uid or not stat.S_ISREG(file.mode):
            continue
        life = ended.get(maker)
        if life is not None and life.began <= file.changed_at <= life.ended:
            found.append(file)
    return found


def removable(found: Collection[SharedFile], processes: Collection[ProcessView]) -> list[SharedFile]:
    """Returns which of the candidates `found` nobody can use any more; none of them where one process is uncertain.

    Args:
        processes: every living process that may have opened a candidate.
    """
    if any(process.holds is None or process.sees_folder for process in processes):
        return []
    living = {process.pid for process in processes}
    held = frozenset[str]().union(*(process.holds or () for process in processes))
    return [file for file in found if file.name not in held and maker_of(file.name) not in living]


def line_about(removed: Collection[SharedFile]) -> str:
    """Returns the console's line about files that were removed, the largest ones first."""
    by_size = sorted(removed, key=lambda file: -file.size)
    listed = ", ".join(f"{file.name} ({size_in_words(file.size)})" for file in by_size[:_MAX_LISTED])
    if len(by_size) > _MAX_LISTED:
        all_of_it = size_in_words(sum(file.size for file in by_size))
        listed += f" and {len(by_size) - _MAX_LISTED} more, {all_of_it} in all"
    return f"removed from /dev/shm what processes of this job that have ended left there: {listed}"
