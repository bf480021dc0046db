"""This rank's file of progress (`contract/processes/rank_progress.py`): the last step, and what saves have cost.

The main thread stores all fields but those of a finished save, which the thread `ft_memory` stores. Nothing here
raises: a training does not end because its progress cannot be told.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ft_client.memory.node_folder import names_in
from rank_monitor.contract.processes import rank_progress
from rank_monitor.contract.processes.rank_progress import OFFSETS, SIZE, RankProgress

_NUMBER = struct.Struct("<Q")
_PERMISSIONS = 0o600


class StepNotes:
    """Where one rank notes its steps and saves.

    Args:
        kept: the rank's file, mapped (`_mapped`). None: what is noted is seen by nobody.
    """

    def __init__(self, kept: mmap.mmap | None = None) -> None:
        self._kept: mmap.mmap | bytearray = bytearray(SIZE)
        if kept is not None:
            self._kept = kept

    def begins(self, step: int) -> None:
        """Notes that the training goes on after a step. What saves have cost before stays: a restart in process belongs
        to the same cycle."""
        now_ns = time.monotonic_ns()
        self._store("step", step)
        self._store("at_ns", now_ns)
        if self._load("began_ns") == 0:
            self._store("began_ns", now_ns)

    def reached(self, step: int) -> None:
        """Notes that so many steps are done."""
        self._store("step", min(max(0, step), rank_progress.MAX_NUMBER))
        self._store("at_ns", time.monotonic_ns())

    def cost(self, cost_s: float) -> None:
        """Notes for how long a save has held up the training (seconds)."""
        name = "cost_ns"
        if self._load("first_cost_ns") == 0:
            name = "first_cost_ns"
        self._store(name, self._load(name) + max(1, int(cost_s * 1e9)))

    def saved(self, size: int) -> None:
        """Notes that a save of `size` bytes is whole. The background's thread calls this."""
        self._store("size", size)
        self._store("saves", self._load("saves") + 1)

    def failed(self) -> None:
        """Notes that a save has failed."""
        self._store("failed", self._load("failed") + 1)

    def _load(self, name: str) -> int:
        return int(_NUMBER.unpack_from(self._kept, OFFSETS[name])[0])

    def _store(self, name: str, value: int) -> None:
        _NUMBER.pack_into(self._kept, OFFSETS[name], value)


opened: dict[tuple[str, int], StepNotes] = {}
"""Folder and rank -> the file that this process writes: one, also for several objects and calls."""


def begin(folder: str, rank: int, node_ranks: Sequence[int], step: int) -> StepNotes:
    """Notes that the training goes on after a step. Returns where this rank notes the next ones: in a file, which
    begins afresh in each process, or nowhere if that cannot be made.

    Called once the ranks have told each other what the files of before say (`last_step`).

    Args:
        folder: of the node.
        rank: of this rank in the job.
        node_ranks: the ranks of the node. The first one removes the files of ranks that the node does not have any
            more.
        step: from which the training goes on.
    """
    with suppress(OSError):
        if rank == node_ranks[0]:
            for name in names_in(folder):
                if rank_progress.rank_of(name) not in (None, *node_ranks):
                    (Path(folder) / name).unlink(missing_ok=True)
    with suppress(OSError, ValueError):
        path = Path(folder) / rank_progress.progress_name(rank)
        if (folder, rank) not in opened or not path.exists():
            opened[folder, rank] = StepNotes(_mapped(path))
        opened[folder, rank].begins(step)
    return current(folder, rank)


def current(folder: str, rank: int) -> StepNotes:
    """Returns where this rank notes its steps since `begin`; nowhere if that was not called, or could make no file."""
    return opened.get((folder, rank)) or StepNotes()


def _mapped(path: Path) -> mmap.mmap:
    """Returns a new file of progress, mapped. Raises OSError or ValueError: it cannot be made."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, _PERMISSIONS)
    try:
        # Written before it is mapped: a store into a mapping without memory behind it would be a SIGBUS.
        os.pwrite(descriptor, rank_progress.pack(RankProgress()), 0)
        os.ftruncate(descriptor, SIZE)
        return mmap.mmap(descriptor, SIZE)
    finally:
        os.close(descriptor)


def last_step(folder: str) -> int:
    """Returns the last step that a rank of this node has reported, also in an earlier start; 0: none has."""
    known = rank_progress.read_all(folder, names_in(folder))
    return max((progress.step for progress in known.values()), default=0)
