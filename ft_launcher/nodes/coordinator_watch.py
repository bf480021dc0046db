"""The watch over the coordinator by one node: when to read its beats, and which term is lost.

A node's link calls it in its own thread, on a store apart from the nodes; who takes over is decided elsewhere
(`attempt.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ft_launcher.nodes.beat_schedule import BeatReader
from ft_launcher.nodes.coordinator_service import BEAT, TERM
from ft_launcher.nodes.job_store import JobStore
from ft_launcher.nodes.questions import COUNTERS


class CoordinatorWatch:
    """Watches the coordinator, on a store apart from the nodes, for one node that may take over from it.

    Deputies look as often as the coordinator does; the others only so that the job outlives coordinator and deputies
    lost at once. `period_s` may be set by another thread: how often a deputy looks, None for the others.
    """

    def __init__(self, beat_s: float, timeout_s: float) -> None:
        self.period_s: float | None = None
        self.asked: Sequence[bytes] = ()
        """The values of `questions.COUNTERS` at the last look."""
        self._beat_s, self._timeout_s = beat_s, timeout_s
        self._term = b""
        self._begin(None)

    def _begin(self, period_s: float | None) -> None:
        self._begun_with = period_s
        if period_s is None:
            period_s = self._timeout_s
        self._beat_reader = BeatReader(self._timeout_s, self._beat_s, period_s)
        self.next_look = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time to read the coordinator's beats."""
        if self._begun_with != self.period_s:
            self._begin(self.period_s)
        return time.monotonic() >= self.next_look

    def lost_term(self, store: JobStore) -> int | None:
        """Reads the coordinator's beats. Returns its term if it has not beaten for too long; else None.

        Raises:
            StoreLost: the store does not answer.
        """
        self.next_look = time.monotonic() + self._beat_reader.period_s
        counters, (term, *self.asked) = store.counters([BEAT], (TERM, *COUNTERS))
        now = time.monotonic()
        if term != self._term:  # another took over: it may not have beaten yet
            self._begin(self._begun_with)
            self._term = term
        self._beat_reader.watch([BEAT], now)
        lost = self._beat_reader.read(counters, now)
        # Only a deputy looks often enough: a node that looks seldom would take each look without news for a loss.
        is_deputy = self._begun_with is not None
        if is_deputy:
            self.next_look = self._beat_reader.next_reading(now)
        else:
            self.next_look = now + self._beat_reader.period_s
        if lost:
            return int(term or 1)
        return None
