"""Watches the coordinator, on a store apart from the nodes, for whoever is to take over from it. Reads; decides little.

Deputies look every beat; the others only so that the job outlives coordinator and deputies lost at once.
"""

from __future__ import annotations

import time

from ft_launcher.nodes.coordination import BEAT, TERM
from ft_launcher.nodes.job_store import JobStore
from ft_launcher.nodes.silence import Silence


class Watch:
    """Of one node; `deputy` may be set by another thread."""

    def __init__(self, beat_s: float, timeout_s: float) -> None:
        self.deputy = False
        self._beat_s, self._timeout_s = beat_s, timeout_s
        self._term = b""
        self._begin(False)

    def _begin(self, deputy: bool) -> None:
        self._as_deputy = deputy
        self._period_s = self._beat_s if deputy else self._timeout_s
        self._silence = Silence(self._timeout_s, self._period_s)
        self._next_look = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time to look."""
        if self._as_deputy != self.deputy:
            self._begin(self.deputy)
        return time.monotonic() >= self._next_look

    def silent_term(self, store: JobStore) -> int | None:
        """Looks; the term of the coordinator if it has been silent for too long.

        Raises:
            StoreLost: the store does not answer.
        """
        self._next_look = time.monotonic() + self._period_s - self._beat_s / 2
        counters, (term,) = store.counters([BEAT], (TERM,))
        now = time.monotonic()
        if term != self._term:  # another took over: it may not have beaten yet
            self._term, self._silence = term, Silence(self._timeout_s, self._period_s)
        self._silence.watch([BEAT], now)
        return int(term or 1) if self._silence.read(counters, now) else None
