"""Ends ranks whose program has ended with an error and whose process does not end: an exit function waits, or a thread
that is no daemon, or the text of the exception is never made. Their peers would wait for them for ever.

Called by `agent/ranks.py` in the cycle loop, from the moment at which such a rank says that its program has failed. A
process that still works, as a thread that uploads a checkpoint does, is let finish for a while.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from rank_monitor.contract.processes import proc

_LEAST_S = 1.0
"""An interpreter with torch takes up to half a second to end, on a busy machine longer, some of it off the CPU."""
_LONGEST_PERIOD_S, _PERIODS = 1.0, 4
"""How often a rank is looked at (seconds), and how often at least within the limit."""
_CPU_S, _IO_BYTES = 0.02, 1 << 16
"""Less than this within the limit is no work. In 15 s an upload of 1 MB/s over TLS takes 39 ms of CPU time, and an idle
rank without the threads that poll 2 ms (measured)."""
_POLLING = ("gloo_", "pt_", "NCCL", "cuda-")
"""How the names of threads begin that torch, NCCL and CUDA start: gloo's takes 30 ms in 15 s while nothing happens."""
_PROMPTS = ("tty", "woken", "select", "poll")
"""What the kernel calls the wait of a process for a line of its terminal, as under a debugger."""


@dataclass(frozen=True)
class Work:
    """What the processes of a rank have done so far: CPU time (seconds), bytes read and written, and which they are."""

    cpu_s: float = 0.0
    io_bytes: int = 0
    pids: frozenset[int] = frozenset()

    def is_more_than(self, before: Work) -> bool:
        """Whether they have worked since, or one of them has started or ended."""
        is_busy = self.cpu_s >= before.cpu_s + _CPU_S or self.io_bytes >= before.io_bytes + _IO_BYTES
        return is_busy or self.pids != before.pids


@dataclass
class _Failed:
    """A rank whose program has failed: since when, and when its processes last worked (monotonic seconds)."""

    pid: int
    exit_code: int
    since: float
    work: Work
    worked_at: float
    next_check: float


class FailedPrograms:
    """The ranks of this node whose program has failed.

    Args:
        idle_s: how long such a rank may do nothing (seconds).
        busy_s: how long it may work (seconds); None: without limit.
        look: pid -> what its processes have done so far; None: a debugger or a prompt holds it, which is no end.
    """

    def __init__(self, idle_s: float, busy_s: float | None, look: Callable[[int], Work | None]) -> None:
        self._idle_s = max(idle_s, _LEAST_S)
        self._busy_s = None
        if busy_s is not None:
            self._busy_s = max(busy_s, self._idle_s)
        self._look = look
        self._failed: dict[int, _Failed] = {}

    def begin(self, local_rank: int, pid: int, exit_code: int, now: float) -> None:
        """Notes that the program of a rank has failed.

        Args:
            exit_code: what its process was to end with, by its own word; 1 is taken for what is no code of a failure.
        """
        if not 0 < exit_code < 256 and exit_code != -signal.SIGINT:
            exit_code = 1
        self._failed[local_rank] = _Failed(pid, exit_code, now, Work(), now, now + self._period_s)

    def forget(self, local_rank: int) -> None:
        """Forgets a rank that has ended."""
        self._failed.pop(local_rank, None)

    def next_check(self) -> float | None:
        """When to call `due` (monotonic seconds); None: no program has failed."""
        return min((failed.next_check for failed in self._failed.values()), default=None)

    def due(self, now: float) -> dict[int, tuple[int, str]]:
        """Returns the ranks that have to be ended now, each with its exit code and the reason; forgets these."""
        found = {}
        for local_rank, failed in list(self._failed.items()):
            if now < failed.next_check:
                continue
            failed.next_check = now + self._period_s
            why = self._why_end(failed, now)
            if why:
                found[local_rank] = failed.exit_code, why
                self.forget(local_rank)
        return found

    @property
    def _period_s(self) -> float:
        return min(_LONGEST_PERIOD_S, self._idle_s / _PERIODS)

    def _why_end(self, failed: _Failed, now: float) -> str:
        """Takes a look at a rank; returns why it is to be ended, or empty."""
        work = self._look(failed.pid)
        if work is None:
            failed.since = failed.worked_at = now
        elif work.is_more_than(failed.work):
            failed.work, failed.worked_at = work, now
        if self._busy_s is not None and now >= failed.since + self._busy_s:
            return f"it has not ended {self._busy_s:g} s later (--ft-linger)"
        if now >= failed.worked_at + self._idle_s:
            return f"its process did not end and did nothing for {self._idle_s:g} s (--workers-stop-timeout)"
        return ""


def work_of(pid: int) -> Work | None:
    """Returns what a rank and all that it started have done; None while a debugger holds it or it shows a prompt."""
    import psutil  # here: it takes 20 ms, which only such a rank must wait

    if proc.status(pid).get("TracerPid", "0") != "0" or _shows_prompt(pid):
        return None
    cpu_s, io_bytes, pids = 0.0, 0, set()
    with suppress(psutil.Error):
        rank = psutil.Process(pid)
        for process in (rank, *rank.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended, or is another user's
                pids.add(process.pid)
                cpu_s += sum(process.cpu_times()[:4])  # its own, and that of children which it has waited for
                polling = (thread for thread in process.threads() if proc.name_of(thread.id).startswith(_POLLING))
                cpu_s -= sum(thread.user_time + thread.system_time for thread in polling)
                moved = process.io_counters()
                io_bytes += moved.read_chars + moved.write_chars
    return Work(cpu_s, io_bytes, frozenset(pids))


def _shows_prompt(pid: int) -> bool:
    """Whether the main thread may wait for a line of a terminal: `sys.excepthook` may be that of a debugger."""
    try:
        is_terminal = os.readlink(f"/proc/{pid}/fd/0").startswith(("/dev/pts/", "/dev/tty"))  # noqa: PTH115 (a link)
    except OSError:
        return False
    return is_terminal and any(name in proc.waits_in(pid) for name in _PROMPTS)
