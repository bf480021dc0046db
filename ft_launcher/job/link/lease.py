"""The lease of a node: how long its ranks may run after the last beat that the store answered. A timerfd of the kernel.

Why: a node that the others count as lost must not run its ranks any more. Ranks of two cycles would write the same
checkpoint, and the old ones would disturb the collectives of the new ones. The node cannot ask the others, since it may
have lost its network; so it ends its ranks by itself, before the others go on (`coordinator/beat_schedule.py` has the
times).

`rendezvous/handler.py` makes the lease, and `node_link.py` begins it before ranks run and renews it with each answered
beat. Every monitor of the node has a duplicate of the descriptor, and ends its rank when the timer expires. A thread of
the launcher would not do: the timer also expires while this process does not run (SIGSTOP, a page fault on a file
server, a thread that keeps the interpreter lock). It counts by CLOCK_BOOTTIME, which includes the time for which the
machine was suspended: the other nodes counted that time, too.

    begin --> runs --renew (each answered beat)--> runs --limit_s without one--> expired: the monitors end the ranks
                |                                                                   |
                +---end (no rank runs any more)---> stopped <-----------------------+
                                                       begin starts it again
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time

logger = logging.getLogger(__name__)

# From sys/timerfd.h. An absolute time: one that has already passed makes the timer readable at once.
_TFD_TIMER_ABSTIME = 1
_NS_PER_S = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Lease:
    """The lease of one node, from `begin` to `end`. After it has expired, only `begin` starts another. Thread-safe.

    Args:
        limit_s: how long it lasts, from the moment at which the last answered beat was sent (seconds).

    Where the system refuses a timer the launcher works without one, and says so: a launcher that runs ends its ranks
    by itself when the node is cut off; only one that stands still does not.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._lock = threading.Lock()
        self._until: float | None = None
        self._clock = time.CLOCK_BOOTTIME
        self._timer = self._make_timer()

    def _make_timer(self) -> int:
        # Where CLOCK_BOOTTIME is refused: CLOCK_MONOTONIC differs only in not counting suspended time.
        for clock in (time.CLOCK_BOOTTIME, time.CLOCK_MONOTONIC):
            timer = int(self._libc.timerfd_create(clock, os.O_NONBLOCK | os.O_CLOEXEC))
            if timer >= 0:
                self._clock = clock
                return timer
        reason = os.strerror(ctypes.get_errno())
        logger.warning(
            "no timer for the monitors (%s): they do not end the ranks of a launcher that stands still", reason
        )
        return -1

    def fileno(self) -> int:
        """Returns a descriptor that is readable once the lease has expired; -1 where the system has no such timer."""
        return self._timer

    def now(self) -> float:
        """Returns the current time in seconds by the lease's clock."""
        return time.clock_gettime(self._clock)

    def begin(self, sent_at: float) -> None:
        """Starts the lease, before ranks run. `sent_at`: when the last answered beat was sent, by the lease's clock."""
        with self._lock:
            self._set(sent_at + self.limit_s)

    def renew(self, sent_at: float) -> None:
        """Extends the lease, since the beat sent at `sent_at` (by the lease's clock) was answered.

        Does nothing after the lease has expired: the other nodes may have gone on without this one, and the monitors
        are ending its ranks. Does nothing while no lease runs.
        """
        with self._lock:
            if self._until is not None and self.now() < self._until < sent_at + self.limit_s:
                self._set(sent_at + self.limit_s)

    def end(self) -> None:
        """Stops the lease. Call it when no rank runs any more."""
        with self._lock:
            self._set(None)

    def silent_s(self) -> float | None:
        """Returns the seconds since the last answered beat if the lease has expired; None before that."""
        until, now = self._until, self.now()
        if until is None or now < until:
            return None
        return now - until + self.limit_s

    def close(self) -> None:
        """Stops and closes the timer. The monitors' duplicates do not become readable any more."""
        with self._lock:
            self._set(None)
            if self._timer >= 0:
                os.close(self._timer)
                self._timer = -1

    def _set(self, until: float | None) -> None:
        """Sets the timer to expire at `until`, or stops it. The caller holds the lock."""
        self._until = until
        if self._timer < 0:
            return
        if until is None:
            moment_ns = 0
        else:
            # timerfd_settime takes zero as a request to stop the timer.
            moment_ns = max(1, int(until * _NS_PER_S))
        value = _Itimerspec(_Timespec(0, 0), _Timespec(*divmod(moment_ns, _NS_PER_S)))
        if self._libc.timerfd_settime(self._timer, _TFD_TIMER_ABSTIME, ctypes.byref(value), None):
            logger.warning("the lease of this node cannot be set: %s", os.strerror(ctypes.get_errno()))
