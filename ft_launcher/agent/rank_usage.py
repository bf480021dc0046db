"""For how long the ranks of a node have used no CPU time, and have neither read nor written anything.

`hang_watch.py` asks while a rank stands still, and at no other time. Decides nothing: `attribution/hang_clocks.py` says
what counts as activity. A rank that is gone, or not ours to read, shows none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ft_launcher.attribution.hang_clocks import Usage


@dataclass(frozen=True)
class _Still:
    """What a rank had used at a moment (monotonic seconds); it has done nothing since."""

    usage: Usage
    since: float


class RankUsage:
    """What the ranks of one cycle use.

    Args:
        stack_file: returns the file that a local rank writes its stacks to: they are written because of our looks.
    """

    def __init__(self, stack_file: Callable[[int], Path]) -> None:
        self._stack_file = stack_file
        self._known: dict[int, _Still] = {}

    def forget(self) -> None:
        """Forgets what was read: the next reading is the first one again."""
        self._known.clear()

    def still_s(self, pids: Mapping[int, int]) -> dict[int, float]:
        """Reads what ranks use. Returns for how long each has done nothing since the first reading (seconds).

        Args:
            pids: of the ranks that run, by local rank.
        """
        children, now = _children(), time.monotonic()
        found = {}
        for local_rank, pid in pids.items():
            usage = self._read(local_rank, pid, children)
            before = self._known.get(local_rank)
            if before is None or usage.is_beyond(before.usage, now - before.since):
                before = self._known[local_rank] = _Still(usage, now)
            found[local_rank] = now - before.since
        return found

    def _read(self, local_rank: int, pid: int, children: Mapping[int, list[int]]) -> Usage:
        main_cpu_s, io_bytes, cpu_s = 0.0, 0, 0.0
        descendants, to_visit = set[int](), list(children.get(pid, ()))
        while to_visit:
            descendant = to_visit.pop()
            if descendant not in descendants:
                descendants.add(descendant)
                to_visit += children.get(descendant, ())
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            main_cpu_s = sum(used.user_time + used.system_time for used in process.threads() if used.id == pid)
            used_io = process.io_counters()
            io_bytes = used_io.read_chars + used_io.write_chars + used_io.read_bytes
            io_bytes -= self._stack_file(local_rank).stat().st_size
        for descendant in descendants:
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(descendant).cpu_times()
                cpu_s += times.user + times.system
        return Usage(main_cpu_s, io_bytes, frozenset(descendants), cpu_s)


def _children() -> dict[int, list[int]]:
    """Returns the children of each process that has any. One walk through /proc for all ranks."""
    found: dict[int, list[int]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found.setdefault(process.ppid(), []).append(process.pid)
    return found
