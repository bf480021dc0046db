"""Watches the coordinator, on a store apart from the nodes, for whoever is to take over from it. Reads; decides little.

Deputies look as often as the coordinator does; the others only so that the job outlives coordinator and deputies lost
at once.
"""

from __future__ import annotations

import time

from ft_launcher.nodes.coordination import BEAT, TERM
from ft_launcher.nodes.job_store import JobStore
from ft_launcher.nodes.silence import Silence


class Watch:
    """Of one node; `period_s` may be set by another thread: how often a deputy looks, None for the others."""

    def __init__(self, beat_s: float, timeout_s: float) -> None:
        self.period_s: float | None = None
        self._beat_s, self._timeout_s = beat_s, timeout_s
        self._term = b""
        self._begin(None)

    def _begin(self, period_s: float | None) -> None:
        self._begun_with = period_s
        self._silence = Silence(self._timeout_s, self._beat_s, self._timeout_s if period_s is None else period_s)
        self.next_look = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time to look."""
        if self._begun_with != self.period_s:
            self._begin(self.period_s)
        return time.monotonic() >= self.next_look

    def silent_term(self, store: JobStore) -> int | None:
        """Looks; the term of the coordinator if it has been silent for too long.

        Raises:
            StoreLost: the store does not answer.
        """
        self.next_look = time.monotonic() + self._silence.period_s
        counters, (term,) = store.counters([BEAT], (TERM,))
        now = time.monotonic()
        if term != self._term:  # another took over: it may not have beaten yet
            self._begin(self._begun_with)
            self._term = term
        self._silence.watch([BEAT], now)
        lost = self._silence.read(counters, now)
        is_deputy = self._begun_with is not None  # whoever looks seldom takes every look without news for a loss
        self.next_look = self._silence.next_reading(now) if is_deputy else now + self._silence.period_s
        return int(term or 1) if lost else None
