"""Since when a rank has neither executed Python in its main thread nor reported anything. Pure.

`watch.py` keeps one `Standstill` for each rank; the limit is `hang_timeout`. While all is well, nothing but the stamps
that come anyway is noted. When a quarter of the limit has passed without a stamp or a report, the launcher is notified,
once for each standstill. The launcher then looks for who waits for whom: nobody else knows the ranks of all monitors.
Whether the standstill is a hang, and which rank is to be ended, is the launcher's decision (`HangOverdue`).

Moments are monotonic nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable

from rank_monitor.limits import nanoseconds

_CHECK_PART = 4
"""The launcher is notified after this part of the limit: a quarter. A healthy rank stamps in each twentieth of the
limit (`MonitorSettings.stamp_period`), so a rank that runs is never checked."""


class Standstill:
    """The stamps and reports of one rank.

    Args:
        limit_s: the limit in seconds; None: there is none, and the launcher is never notified.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._stamp_ns: int | None = None
        self._idle_from_ns = 0
        self._printed_ns: int | None = None
        self._notified_ns: int | None = None

    def stamped(self, stamp_ns: int, sent_ns: int) -> None:
        """Notes a stamp. A rank sends the same stamp again as long as its main thread executes no Python.

        The main thread may have run until the first message with this stamp was sent, so the standstill counts from
        `sent_ns` of that message. Later messages with the same stamp change nothing.
        """
        if self._stamp_ns is None or stamp_ns > self._stamp_ns:
            self._stamp_ns = stamp_ns
            self._idle_from_ns = sent_ns

    def printed(self, at_ns: int) -> None:
        """Notes a step that the rank printed: a report, for a program that reports nothing else."""
        self._printed_ns = max(self._printed_ns or 0, at_ns)

    def reported_ns(self, sign_ns: int | None) -> int | None:
        """Returns when the rank last reported anything, or printed a step; None: never.

        Args:
            sign_ns: the rank's last heartbeat, section or iteration; None: there was none.
        """
        known = [moment for moment in (sign_ns, self._printed_ns) if moment is not None]
        return max(known, default=None)

    def idle_since_ns(self, sign_ns: int | None) -> int | None:
        """Returns since when there is neither a new stamp nor a report; None: the rank sends no stamps."""
        if self._stamp_ns is None:
            return None
        return max(self._idle_from_ns, self.reported_ns(sign_ns) or 0)

    def check_at_ns(self, sign_ns: int | None, paused_since: Callable[[int], int]) -> int | None:
        """Returns when the launcher is to be notified; None: there is no limit, or this standstill was notified.

        Args:
            sign_ns: as for `reported_ns`.
            paused_since: returns how many nanoseconds the machine stood still after a moment.
        """
        since_ns = self.idle_since_ns(sign_ns)
        if self._limit_s is None or since_ns is None or self._notified_ns == since_ns:
            return None
        return since_ns + nanoseconds(self._limit_s) // _CHECK_PART + paused_since(since_ns)

    def notified(self, sign_ns: int | None) -> None:
        """Notes that the launcher was notified of the present standstill. The next stamp or report begins another."""
        self._notified_ns = self.idle_since_ns(sign_ns)
