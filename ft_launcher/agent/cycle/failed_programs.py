"""Ends ranks whose program has ended with an error and whose process does not end: an exit function waits, or a thread
that is no daemon, or the text of the exception is never made. Their peers would wait for them for ever.

Called by `agent/ranks.py` in the cycle loop, from the moment at which such a rank says that its program has failed. A
process that still works, as a thread that uploads a checkpoint does, is let finish for a while.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from ft_launcher.node.processes.rank_usage import Usage, usage_of
from rank_monitor.contract.processes import proc

_LEAST_S = 1.0
"""An interpreter with torch takes up to half a second to end, on a busy machine longer, some of it off the CPU."""
_LONGEST_PERIOD_S, _PERIODS = 1.0, 4
"""How often a rank is looked at (seconds), and how often at least within the limit."""
_CPU_S, _IO_BYTES = 0.02, 1 << 16
"""Less than this within the limit is no work. In 15 s an upload of 1 MB/s over TLS takes 39 ms of CPU time, and an idle
rank without the threads that poll 2 ms (measured)."""
_PROMPTS = ("tty", "woken", "select", "poll")
"""What the kernel calls the wait of a process for a line of its terminal, as under a debugger."""


@dataclass
class _Failed:
    """A rank whose program has failed: since when, and when its processes last worked (monotonic seconds)."""

    pid: int
    exit_code: int
    since: float
    work: Usage
    worked_at: float
    next_check: float


class FailedPrograms:
    """The ranks of this node whose program has failed.

    Args:
        idle_s: how long such a rank may do nothing (seconds).
        busy_s: how long it may work (seconds); None: without limit.
        look: pid -> what its processes have done so far; None: a debugger or a prompt holds it, which is no end.
    """

    def __init__(self, idle_s: float, busy_s: float | None, look: Callable[[int], Usage | None]) -> None:
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
        self._failed[local_rank] = _Failed(pid, exit_code, now, Usage(), now, now + self._period_s)

    def reset(self, local_rank: int) -> None:
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
                self.reset(local_rank)
        return found

    @property
    def _period_s(self) -> float:
        return min(_LONGEST_PERIOD_S, self._idle_s / _PERIODS)

    def _why_end(self, failed: _Failed, now: float) -> str:
        """Takes a look at a rank; returns why it is to be ended, or empty."""
        work = self._look(failed.pid)
        if work is None:
            failed.since = failed.worked_at = now
        elif _has_worked(work, failed.work):
            failed.work, failed.worked_at = work, now
        if self._busy_s is not None and now >= failed.since + self._busy_s:
            return f"it has not ended {self._busy_s:g} s later (--ft-linger)"
        if now >= failed.worked_at + self._idle_s:
            return f"its process did not end and did nothing for {self._idle_s:g} s (--workers-stop-timeout)"
        return ""


def work_of(pid: int) -> Usage | None:
    """Returns what a rank has used so far; None while a debugger holds it or it shows a prompt."""
    if proc.status(pid).get("TracerPid", "0") != "0" or _shows_prompt(pid):
        return None
    return usage_of([pid])[pid]


def _has_worked(usage: Usage, before: Usage) -> bool:
    """Whether any thread of the rank or any descendant has worked since, or one of these has started or ended."""
    is_busy = _cpu_s(usage) >= _cpu_s(before) + _CPU_S or _io_bytes(usage) >= _io_bytes(before) + _IO_BYTES
    return is_busy or usage.descendants != before.descendants


def _cpu_s(usage: Usage) -> float:
    return usage.main_cpu_s + usage.threads_cpu_s + usage.descendants_cpu_s


def _io_bytes(usage: Usage) -> int:
    return usage.io_bytes + usage.descendants_io_bytes


def _shows_prompt(pid: int) -> bool:
    """Whether the main thread may wait for a line of a terminal: `sys.excepthook` may be that of a debugger."""
    try:
        is_terminal = os.readlink(f"/proc/{pid}/fd/0").startswith(("/dev/pts/", "/dev/tty"))  # noqa: PTH115 (a link)
    except OSError:
        return False
    return is_terminal and any(name in proc.waits_in(pid) for name in _PROMPTS)
