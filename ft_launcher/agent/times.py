"""This node's time ledger: passes on the moments of events, and has the recorder write what the ledger says.

Made by `composition.py`, since a job's time begins before its agent does. The agent and its parts call a method where
something begins or ends. Only clocks are read here: what a moment means for the account is decided in
`record/ledger/`. No method that notes something raises an error: a ledger that is wrong must not end a training.

Threads: the agent's thread notes events. Threads that answer requests (the status page) call `now` and `stall`. A lock
protects the ledger between these.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ft_launcher.record.journal.contained import contained
from ft_launcher.record.ledger.account import Account, Category
from ft_launcher.record.ledger.job_ledger import JobLedger, JobTime
from ft_launcher.record.ledger.stall import Stall
from ft_launcher.record.recorder import Recorder
from rank_monitor.contract.wire.rank_times import RankTimes

WRITE_EVERY_S = 600.0
"""Seconds after which the times of a running cycle are written to the journal again. A node that loses its power loses
so much at most, and a day's lines have half a megabyte: 144 lines of 4 KB."""
_MAX_PAST = 20
"""Earlier cycles that a page shows one by one. All others are in the journal."""

_M = TypeVar("_M", bound=Callable[..., None])


def _kept(method: _M) -> _M:
    """Decorates a method that changes the ledger: holds the lock, and logs an error instead of raising it."""

    @functools.wraps(method)
    def locked(self: NodeTimes, *arguments: Any, **more: Any) -> None:
        with self._lock, contained("the time ledger is not kept"):
            method(self, *arguments, **more)

    return cast(_M, locked)


class NodeTimes:
    """The time ledger of one launcher.

    Args:
        recorder: writes its events.
    """

    def __init__(self, recorder: Recorder) -> None:
        now = time.monotonic()
        # Reentrant: `begins` writes the last cycle's times, and a decorated method may call another one.
        self._lock = threading.RLock()
        self._ledger = JobLedger(now, time.time())
        self._recorder = recorder
        self._is_unwritten = False
        self._written_at = now
        self._saved: tuple[int, int] | None = None
        """The cycle and the iteration of the last checkpoint that a rank reported. `_saved_at`: when it was reported
        (monotonic seconds)."""
        self._saved_at = now

    # What begins or ends now.

    @_kept
    def begins(self, category: Category) -> None:
        """Notes what this node does from now on, while no rank runs.

        The health check is the first thing after a cycle whose end is decided, so that cycle's times are written then.
        """
        self._ledger.begins(category, time.monotonic())
        if category is Category.HEALTH:
            self._write_cycle()

    @_kept
    def formed(self, waited_s: float) -> None:
        """Notes that this node has its node rank in the next cycle: the ranks are started next.

        Args:
            waited_s: the part of the time until now that the coordinator made the nodes wait on purpose (seconds).
        """
        self._ledger.begins(Category.LAUNCH, time.monotonic())
        self._ledger.waited(waited_s)

    @_kept
    def ranks_started(self, cycle: int, started_ns: int) -> None:
        """Notes that the ranks of a cycle were started. `started_ns`: when (monotonic nanoseconds)."""
        self._write_cycle()
        self._ledger.ranks_started(cycle, started_ns / 1e9)

    @_kept
    def cycle_over(self) -> None:
        """Notes that the cycle is over; its ranks are stopped next."""
        self._ledger.cycle_over(time.monotonic())

    @_kept
    def failed(self, began: float | None) -> None:
        """Notes that the cycle ended by a fault.

        Args:
            began: when the fault began (monotonic seconds): what the ranks did after that is lost time. None: when the
                cycle ended.
        """
        self._ledger.failed(began)

    @_kept
    def membership_changes(self) -> None:
        """Notes that the group forms anew, without a fault."""
        self._ledger.membership_changes()

    @_kept
    def stopped(self) -> None:
        """Notes that the ranks of the cycle have ended."""
        self._ledger.stopped(time.monotonic())
        self._is_unwritten = True

    # Ledgers of ranks.

    @_kept
    def record(self, cycle: int, times: RankTimes) -> None:
        """Records the time ledger of one rank, which stands for all: ranks take their steps together.

        Called every 10 s while ranks run, and at the end of a cycle. Writes the running cycle's times to the journal
        every `WRITE_EVERY_S`.

        Args:
            cycle: in which the rank runs.
            times: the ledger that its monitor has sent last.
        """
        self._ledger.rank_times(cycle, times)
        now = time.monotonic()
        if times.saved_ns >= 0 and self._saved != (cycle, times.saved):
            self._saved = cycle, times.saved
            self._saved_at = now
        if now >= self._written_at + WRITE_EVERY_S and self._recorder.journal.path is not None:
            self._written_at = now
            self._write(False)

    # What it says.

    def now(self) -> JobTime:
        """Returns the job's times until now. Any thread may call this."""
        with self._lock:
            now = time.monotonic()
            ledger = self._ledger
            past, present = ledger.past[-_MAX_PAST:], ledger.present(now)
            saved_age_s = None
            if present.saved is not None and self._saved == (present.cycle, present.saved):
                saved_age_s = now - self._saved_at
            account, durations = ledger.account(now), ledger.durations(now)
            stall, steps_lost = ledger.stall, ledger.steps_lost(now)
            return JobTime(ledger.category, present, account, durations, past, saved_age_s, stall, steps_lost)

    @property
    def stall(self) -> Stall | None:
        """The stall of the training according to the last ledger of a rank; None: none is known. Any thread may ask."""
        with self._lock:
            return self._ledger.stall

    # Events.

    def finish(self) -> Account | None:
        """Writes what was not written yet, at the end of the job.

        Returns:
            The account of the job, for the console; None: it could not be made.
        """
        account = None
        with self._lock, contained("the time ledger is not kept"):
            now = time.monotonic()
            self._ledger.stopped(now)
            self._write_cycle()
            account = self._ledger.account(now)
            self._recorder.ledger(self._ledger.present(now), account, has_ended=True)
        return account

    def _write_cycle(self) -> None:
        """Writes the times of the cycle that has ended, unless they are written already."""
        if self._is_unwritten:
            self._is_unwritten = False
            self._write(True)

    def _write(self, has_ended: bool) -> None:
        """Writes the times of the cycle that has ended, or of the present one so far."""
        now = time.monotonic()
        part = self._ledger.present(now)
        if has_ended and self._ledger.last is not None:
            part = self._ledger.last
        self._recorder.ledger(part, self._ledger.account(now), has_ended)
