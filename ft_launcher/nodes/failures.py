"""Counts failures in a row of one kind of work on the store: since when, and whether to log one. Pure.

Only work that fails soon after it began counts: a wait that was cut after a while, by a proxy's limit for idle
connections for example, had been taken by the store, and is simply begun again.
"""

from __future__ import annotations

LOG_EVERY_S = 60.0
"""Often enough to be found near the end of a log, seldom enough not to fill it."""


class Failures:
    """Failures in a row, until `worked`. `lasted_s`: seconds from the first to the last, `why`: the last error.

    Args:
        soon_s: work that lasted longer before it failed starts the row anew.
    """

    def __init__(self, soon_s: float) -> None:
        self._soon_s = soon_s
        self.why = ""
        self.worked()

    def worked(self) -> None:
        """Ends the row: the work succeeded."""
        self.lasted_s = 0.0
        self._first: float | None = None
        self._logged_at: float | None = None

    def failed(self, began: float, now: float, why: str) -> bool:
        """Counts a failure of work that began at `began`. Returns whether to log it: the second, then one a minute."""
        self.why = why
        if self._first is None or now - began > self._soon_s:
            self.worked()
            self._first = now
            return False
        self.lasted_s = now - self._first
        is_due = self._logged_at is None or now - self._logged_at >= LOG_EVERY_S
        if is_due:
            self._logged_at = now
        return is_due
