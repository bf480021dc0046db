"""Ends ranks whose program has ended with an error and whose process does not end.

What keeps such a process: an exit function that waits, a thread that is no daemon, or an exception whose text takes for
ever to be made. The other ranks would wait for this one for ever, since its connections stay open.

`agent/ranks.py` calls `begin` when the client in a rank reports that the program has failed, then `due` in the cycle
loop. A process that still works, for example in a thread that uploads a checkpoint, may finish for a while. Reads /proc
of these ranks only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from ft_launcher.node.processes.rank_usage import Usage, usage_of
from rank_monitor.contract.processes import proc

_LEAST_S = 1.0
"""Seconds that a rank has at least, whatever the option says. An interpreter with torch takes up to half a second to
end, on a busy machine longer, and does nothing for a part of this time."""
_LONGEST_PERIOD_S, _PERIODS = 1.0, 4
"""The longest time between two checks of a rank (seconds), and the number of checks within the limit at least."""
_CPU_S, _IO_BYTES = 0.02, 1 << 16
"""Use of CPU (seconds) and bytes moved, below which a rank has not worked within the limit. Measured over 15 s: an
upload of 1 MB/s over TLS takes 39 ms of CPU, and an idle rank, without the threads that poll, 2 ms."""
_PROMPTS = ("tty", "woken", "select", "poll")
"""What the kernel calls the wait of a process for a line of its terminal, as under a debugger."""


@dataclass
class _Failed:
    """A rank whose program has failed.

    Attributes:
        pid: of the rank.
        exit_code: the code with which the rank counts as ended.
        since: when the program failed, or a debugger last held the process (monotonic seconds).
        work: what the rank's processes had used when they last worked.
        worked_at: when they last worked (monotonic seconds).
        next_check: when to check again (monotonic seconds).
    """

    pid: int
    exit_code: int
    since: float
    work: Usage
    worked_at: float
    next_check: float


class FailedPrograms:
    """The ranks of this node whose program has failed.

    Args:
        idle_s: how long such a rank may do nothing (seconds; `--workers-stop-timeout`).
        busy_s: how long such a rank may work (seconds; `--ft-linger`); None: without limit.
        look: called with a rank's pid; returns what the rank's processes have used so far. None: a debugger holds the
            rank, or it shows a prompt, and a person is at work.
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
            local_rank: of the rank.
            pid: of the rank.
            exit_code: the code with which the process was to end, as the rank reported it. 1 is used in its place where
                it is no code of a failure.
            now: monotonic seconds.
        """
        if not 0 < exit_code < 256 and exit_code != -signal.SIGINT:
            exit_code = 1
        self._failed[local_rank] = _Failed(pid, exit_code, now, Usage(), now, now + self._period_s)

    def reset(self, local_rank: int) -> None:
        """Notes that a rank has ended, or is started anew: its program has not failed any more."""
        self._failed.pop(local_rank, None)

    def next_check(self) -> float | None:
        """When to call `due` (monotonic seconds); None: no program has failed."""
        return min((failed.next_check for failed in self._failed.values()), default=None)

    def due(self, now: float) -> dict[int, tuple[int, str]]:
        """Checks the ranks for which a check is due. Returns those that must be ended now: local rank -> (exit code,
        reason). A rank is returned once."""
        found = {}
        for local_rank, failed in list(self._failed.items()):
            if now < failed.next_check:
                continue
            failed.next_check = now + self._period_s
            reason = self._why_end(failed, now)
            if reason:
                found[local_rank] = failed.exit_code, reason
                self.reset(local_rank)
        return found

    @property
    def _period_s(self) -> float:
        """Seconds between two checks of a rank."""
        return min(_LONGEST_PERIOD_S, self._idle_s / _PERIODS)

    def _why_end(self, failed: _Failed, now: float) -> str:
        """Checks one rank; returns why it must be ended; empty: it may go on."""
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
    """Returns what a rank has used so far; None while a debugger holds the rank, or it shows a prompt."""
    if proc.status(pid).get("TracerPid", "0") != "0" or _shows_prompt(pid):
        return None
    return usage_of([pid])[pid]


def _has_worked(usage: Usage, before: Usage) -> bool:
    """Returns whether a thread or a descendant of the rank has worked since `before`, or a descendant has started or
    ended since."""
    is_busy = _cpu_s(usage) >= _cpu_s(before) + _CPU_S or _io_bytes(usage) >= _io_bytes(before) + _IO_BYTES
    return is_busy or usage.descendants != before.descendants


def _cpu_s(usage: Usage) -> float:
    """Returns the CPU time of a rank with its threads and descendants (seconds)."""
    return usage.main_cpu_s + usage.threads_cpu_s + usage.descendants_cpu_s


def _io_bytes(usage: Usage) -> int:
    """Returns what a rank and its descendants have read and written (bytes)."""
    return usage.io_bytes + usage.descendants_io_bytes


def _shows_prompt(pid: int) -> bool:
    """Returns whether the main thread may wait for a line from a terminal: `sys.excepthook` may be a debugger's."""
    try:
        is_terminal = os.readlink(f"/proc/{pid}/fd/0").startswith(("/dev/pts/", "/dev/tty"))  # noqa: PTH115 (a link)
    except OSError:
        return False
    return is_terminal and any(name in proc.waits_in(pid) for name in _PROMPTS)
