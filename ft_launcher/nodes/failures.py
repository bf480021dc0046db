"""Failures of one kind of work on the store, in a row: since when, and whether to say so. Pure.

Only work that fails soon after it began counts: a wait that was cut after a while, by a proxy's limit for idle
connections for example, had been taken by the store, and is simply begun again.
"""

from __future__ import annotations

SAY_EVERY_S = 60.0
"""Often enough to be found near the end of a log, seldom enough not to fill it."""


class Failures:
    """In a row, until `worked`. `lasted_s` is the time from the first to the last of them, `why` the last error.

    Args:
        soon_s: work that lasted longer before it failed starts the row anew.
    """

    def __init__(self, soon_s: float) -> None:
        self._soon_s = soon_s
        self.why = ""
        self.worked()

    def worked(self) -> None:
        """The row is over."""
        self.lasted_s = 0.0
        self._first: float | None = None
        self._said_at: float | None = None

    def failed(self, began: float, now: float, why: str) -> bool:
        """One more, of work that began then; whether to say so: at the second one, and every minute after it."""
        self.why = why
        if self._first is None or now - began > self._soon_s:
            self.worked()
            self._first = now
            return False
        self.lasted_s = now - self._first
        says = self._said_at is None or now - self._said_at >= SAY_EVERY_S
        if says:
            self._said_at = now
        return says
