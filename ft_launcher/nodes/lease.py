"""The lease of a node: how long its ranks may run without another answered beat. Held by the kernel, not by a thread.

It is a timer that the node's beats set anew. Each monitor of the node holds the same timer, and ends its rank when it
runs out: whatever keeps this process from running (SIGSTOP, a page that must come from a file server, a lost
interpreter lock), the timer runs. CLOCK_BOOTTIME goes on while the machine is suspended; the others do not wait either.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time

logger = logging.getLogger(__name__)

_TFD_TIMER_ABSTIME = 1
_NS_PER_S = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Lease:
    """Of one node. It runs from `begin` to `end`; once it has run out, only `begin` gives another.

    Args:
        limit_s: how long it lasts after a beat that was answered.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._lock = threading.Lock()
        self._until: float | None = None
        self._clock = time.CLOCK_BOOTTIME
        self._timer = self._make_timer()

    def _make_timer(self) -> int:
        for clock in (time.CLOCK_BOOTTIME, time.CLOCK_MONOTONIC):
            timer = int(self._libc.timerfd_create(clock, os.O_NONBLOCK | os.O_CLOEXEC))
            if timer >= 0:
                self._clock = clock
                return timer
        why = os.strerror(ctypes.get_errno())
        logger.warning("no timer for the monitors (%s): they do not end the ranks of a launcher that stands still", why)
        return -1

    def fileno(self) -> int:
        """Readable once the lease has run out; below zero where the system gives no such timer."""
        return self._timer

    def now(self) -> float:
        """This moment by the lease's clock."""
        return time.clock_gettime(self._clock)

    def begin(self, sent_at: float) -> None:
        """Ranks are about to run; the last beat that was answered was sent at this moment."""
        with self._lock:
            self._set(sent_at + self.limit_s)

    def renew(self, sent_at: float) -> None:
        """A beat that was sent at this moment was answered. A lease that has run out stays so, as others count it."""
        with self._lock:
            if self._until is not None and self.now() < self._until < sent_at + self.limit_s:
                self._set(sent_at + self.limit_s)

    def end(self) -> None:
        """No rank runs."""
        with self._lock:
            self._set(None)

    def silent_s(self) -> float | None:
        """How long the node has been silent, once the lease has run out; None: it has not."""
        until, now = self._until, self.now()
        return None if until is None or now < until else now - until + self.limit_s

    def close(self) -> None:
        """Lets go of the timer; the monitors' copies do nothing any more."""
        with self._lock:
            self._set(None)
            if self._timer >= 0:
                os.close(self._timer)
                self._timer = -1

    def _set(self, until: float | None) -> None:
        """Sets the timer to a moment, or stops it."""
        self._until = until
        if self._timer < 0:
            return
        moment_ns = 0 if until is None else max(1, int(until * _NS_PER_S))
        value = _Itimerspec(_Timespec(0, 0), _Timespec(*divmod(moment_ns, _NS_PER_S)))
        if self._libc.timerfd_settime(self._timer, _TFD_TIMER_ABSTIME, ctypes.byref(value), None):
            logger.warning("the lease of this node cannot be set: %s", os.strerror(ctypes.get_errno()))
