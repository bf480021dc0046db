"""Since when a rank has neither executed Python in its main thread nor reported anything. Pure.

`watch.py` keeps one for each rank; the limit is `hang_timeout`. While all is well nothing but the stamps that come
anyway is noted. When a quarter of the limit has passed without a stamp or a report, the launcher is told once, and
looks for who waits for whom: nobody else knows the ranks of all monitors. Moments are monotonic nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable

from rank_monitor.limits import nanoseconds

_CHECK_PART = 4
"""The part of the limit after which the launcher is told. A healthy rank stamps in each twentieth of the limit
(`MonitorSettings.stamp_period`), so nothing is looked at while it runs."""


class Standstill:
    """The stamps and reports of one rank.

    Args:
        limit_s: the limit; None: there is none, and the launcher is never told.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._stamp_ns: int | None = None
        self._idle_from_ns = 0
        self._printed_ns: int | None = None
        self._notified_ns: int | None = None

    def stamped(self, stamp_ns: int, sent_ns: int) -> None:
        """Notes a stamp. A rank sends the same one again as long as its main thread executes no Python.

        The main thread may have run until the first message with this stamp was sent: the wait counts from then.
        """
        if self._stamp_ns is None or stamp_ns > self._stamp_ns:
            self._stamp_ns = stamp_ns
            self._idle_from_ns = sent_ns

    def printed(self, at_ns: int) -> None:
        """Notes a step that the rank printed."""
        self._printed_ns = max(self._printed_ns or 0, at_ns)

    def reported_ns(self, sign_ns: int | None) -> int | None:
        """Returns when the rank last reported anything, or printed a step.

        Args:
            sign_ns: its last heartbeat, section or iteration.
        """
        known = [moment for moment in (sign_ns, self._printed_ns) if moment is not None]
        return max(known, default=None)

    def idle_since_ns(self, sign_ns: int | None) -> int | None:
        """Returns since when there is neither stamp nor report; None: the rank sends no stamps."""
        if self._stamp_ns is None:
            return None
        return max(self._idle_from_ns, self.reported_ns(sign_ns) or 0)

    def check_at_ns(self, sign_ns: int | None, paused_since: Callable[[int], int]) -> int | None:
        """Returns when the launcher is to be told; None: there is no limit, or it was told of this standstill.

        Args:
            sign_ns: as for `reported_ns`.
            paused_since: returns how long the machine stood still after a moment.
        """
        since_ns = self.idle_since_ns(sign_ns)
        if self._limit_s is None or since_ns is None or self._notified_ns == since_ns:
            return None
        return since_ns + nanoseconds(self._limit_s) // _CHECK_PART + paused_since(since_ns)

    def notified(self, sign_ns: int | None) -> None:
        """Notes that the launcher was told of the present standstill. The next stamp or report begins another."""
        self._notified_ns = self.idle_since_ns(sign_ns)
