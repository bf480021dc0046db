"""What the processes of a rank use: CPU time, bytes read and written, and which processes descend from the rank.

Two callers ask whether a rank that shows no progress works all the same:
- `agent/hang_watch.py`, while a rank stands still: a rank that uses the CPU or a disk does not hang,
- `agent/cycle/failed_programs.py`, while a rank's program has failed and its process does not end.

Nobody reads this at any other time, since each reading walks through /proc. Each caller decides for itself how much use
counts as work. A rank that is gone, or that this user may not read, uses nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rank_monitor.contract.processes import proc

_POLLING = ("gloo_", "pt_", "NCCL", "cuda-")
"""How the names of threads begin that torch, NCCL and CUDA start and that poll: gloo's thread takes 30 ms of CPU in
15 s while nothing happens."""
_COMPUTING = ("pt_autograd", "pt_dist_engine")
"""Threads whose names begin as in `_POLLING` and which compute all the same: the main thread waits for these in
`backward()`."""
_IDLE_CPU_S, _IDLE_PART = 0.05, 0.002
"""CPU time that is no activity: a constant part (seconds), and a part of the time that has passed. The first is what a
dump of the stacks takes. The second covers workers of a data loader, each of which checks every 5 s whether its parent
lives (0.1 ms). For comparison: a child that works and sleeps most of the time takes 1 % of a core."""
_IDLE_THREADS_PART = 0.1
"""CPU time of the other threads of a rank that is no activity, as part of the time that has passed. A thread that looks
again each millisecond whether it is needed takes up to 5 % of a core (measured in Python); one that computes has less
than a tenth only where more than ten share each core."""


@dataclass(frozen=True)
class Usage:
    """What a rank has used so far.

    Attributes:
        main_cpu_s: CPU time of its main thread (seconds).
        threads_cpu_s: of its other threads, without those that poll.
        io_bytes: what the rank's own process has read and written.
        descendants: pids of the living processes that descend from the rank.
        descendants_cpu_s: CPU time of the living descendants, and of those that have ended and were waited for.
        descendants_io_bytes: what the living descendants have read and written.
    """

    main_cpu_s: float = 0.0
    threads_cpu_s: float = 0.0
    io_bytes: int = 0
    descendants: frozenset[int] = frozenset()
    descendants_cpu_s: float = 0.0
    descendants_io_bytes: int = 0

    def is_beyond(self, before: Usage, passed_s: float) -> bool:
        """Returns whether the rank did something since `before`, which was read `passed_s` seconds earlier.

        - Main thread and descendants: any CPU time beyond the idle one counts.
        - Other threads of the rank: only much CPU time counts (`_IDLE_THREADS_PART`). Threads of libraries wake now and
          then while the rank waits, but the main thread may wait for a thread that computes.
        - Bytes that the rank read or wrote, and descendants that are new, count.
        - Bytes that descendants read or wrote do not count: a logger among them writes for as long as the job lives.
        """
        idle_s = _IDLE_CPU_S + _IDLE_PART * passed_s
        has_computed = self.main_cpu_s - before.main_cpu_s > idle_s
        has_computed |= self.threads_cpu_s - before.threads_cpu_s > _IDLE_CPU_S + _IDLE_THREADS_PART * passed_s
        # This sum falls when a descendant ends that nobody waits for, which shows no activity.
        has_computed |= self.descendants_cpu_s - before.descendants_cpu_s > idle_s
        return has_computed or self.io_bytes != before.io_bytes or bool(self.descendants - before.descendants)


def usage_of(pids: Iterable[int]) -> dict[int, Usage]:
    """Returns what each of these ranks has used so far, by pid. Walks once through /proc for all of them."""
    children = _children()
    return {pid: _usage(pid, children) for pid in pids}


def _usage(pid: int, children: Mapping[int, list[int]]) -> Usage:
    """Returns what rank `pid` and its descendants have used. `children`: as returned by `_children`."""
    descendants, to_visit = set[int](), list(children.get(pid, ()))
    while to_visit:
        descendant = to_visit.pop()
        if descendant not in descendants:
            descendants.add(descendant)
            to_visit += children.get(descendant, ())
    own = _of_process(pid)
    of_descendants = [_of_process(descendant) for descendant in descendants]
    return Usage(
        main_cpu_s=own.main_cpu_s,
        threads_cpu_s=own.threads_cpu_s,
        io_bytes=own.io_bytes,
        descendants=frozenset(descendants),
        descendants_cpu_s=own.waited_cpu_s + sum(used.cpu_s for used in of_descendants),
        descendants_io_bytes=sum(used.io_bytes for used in of_descendants),
    )


@dataclass
class _OfProcess:
    """What one process has used; `waited_cpu_s`: CPU time of children that it has waited for, and of theirs."""

    main_cpu_s: float = 0.0
    threads_cpu_s: float = 0.0
    io_bytes: int = 0
    waited_cpu_s: float = 0.0

    @property
    def cpu_s(self) -> float:
        """All CPU time that this process accounts for (seconds)."""
        return self.main_cpu_s + self.threads_cpu_s + self.waited_cpu_s


def _of_process(pid: int) -> _OfProcess:
    """Returns what one process has used; zeros where it has ended or is another user's."""
    import psutil  # Imported here: this takes 20 ms, which a job without a standstill need not wait.

    found = _OfProcess()
    with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
        process = psutil.Process(pid)
        times = process.cpu_times()
        found.waited_cpu_s = times.children_user + times.children_system
        for thread in process.threads():
            if thread.id == pid:
                found.main_cpu_s = thread.user_time + thread.system_time
            elif _may_compute(proc.name_of(thread.id)):
                found.threads_cpu_s += thread.user_time + thread.system_time
        moved = process.io_counters()
        # What is read through a mapping of a file is in `read_bytes` alone.
        found.io_bytes = moved.read_chars + moved.write_chars + moved.read_bytes
    return found


def _may_compute(name: str) -> bool:
    """Returns whether the CPU time of a thread with this name may be work: not if the thread is known to poll."""
    return name.startswith(_COMPUTING) or not name.startswith(_POLLING)


def _children() -> dict[int, list[int]]:
    """Returns the children of each process that has any."""
    import psutil  # as above

    found: dict[int, list[int]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found.setdefault(process.ppid(), []).append(process.pid)
    return found


@dataclass(frozen=True)
class _Still:
    """What a rank had used at `since` (monotonic seconds). The rank has done nothing from then on."""

    usage: Usage
    since: float


class RankUsage:
    """What the ranks of one cycle use, and for how long each rank's use has not changed.

    Args:
        stack_file: returns the file that a local rank writes its stacks to. The launcher asks for stacks at each check
            for a hang, so these bytes must not count as activity of the rank.
    """

    def __init__(self, stack_file: Callable[[int], Path]) -> None:
        self._stack_file = stack_file
        self._known: dict[int, _Still] = {}

    def reset(self) -> None:
        """Forgets what was read: the next call of `still_s` counts from its own reading."""
        self._known.clear()

    def still_s(self, pids: Mapping[int, int]) -> dict[int, float]:
        """Reads what ranks use; returns for how long each has done nothing (seconds), by local rank.

        Counts from the first reading, so the first call returns 0.0 for every rank.

        Args:
            pids: local rank -> pid, of the ranks that run.
        """
        usages, now = usage_of(pids.values()), time.monotonic()
        found = {}
        for local_rank, pid in pids.items():
            usage = self._without_stacks(local_rank, usages[pid])
            before = self._known.get(local_rank)
            if before is None or usage.is_beyond(before.usage, now - before.since):
                before = self._known[local_rank] = _Still(usage, now)
            found[local_rank] = now - before.since
        return found

    def _without_stacks(self, local_rank: int, usage: Usage) -> Usage:
        """Returns `usage` without the bytes of the stacks that the rank wrote because the launcher asked for them."""
        with contextlib.suppress(OSError):
            return replace(usage, io_bytes=usage.io_bytes - self._stack_file(local_rank).stat().st_size)
        return usage
