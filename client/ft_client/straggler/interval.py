"""Decides after how many steps a report is due, the same on every rank. Pure.

A report is a collective, so all ranks must make it at the same step, although no two ranks have the same clock. So the
interval in seconds becomes a number of steps: the interval divided by the median of the recent step times. All ranks
take the largest median of any rank. They agree on it after the first steps, and then four times per report; between
these agreements they only count.

`detector.py` measures and asks the other ranks. This file is apart from it, so that the agreement is tested with step
times alone.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

_RECENT_STEPS = 16
"""A few slow steps among so many, as with a checkpoint or an evaluation, do not change the median."""
_FIRST_AGREEMENT = 4
"""Steps. Earlier, the slow first steps of a training would be the median."""
_AGREEMENTS_PER_REPORT = 4
"""So that steps which become slower are noticed within a quarter of the interval."""
_SHORTEST_STEP_S = 1e-6
"""A median of zero must not make the number of steps infinite."""


class IntervalTracker:
    """Counts the steps of one rank.

    Args:
        interval_s: seconds between two reports.
    """

    def __init__(self, interval_s: float) -> None:
        self.elapsed = False
        """Whether the last step ended an interval."""
        self._interval_s = interval_s
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._last_s: float | None = None
        self._steps_per_report = math.inf
        self._since_report = 0
        self._since_agreement = 0
        self._agree_after = _FIRST_AGREEMENT

    def step(self, now_s: float) -> bool:
        """Counts one step. Returns whether the ranks must agree now: the caller then calls `agree`.

        Args:
            now_s: when the step ended (monotonic seconds).
        """
        if self._last_s is not None:
            self._recent.append(now_s - self._last_s)
        self._last_s = now_s
        if self.elapsed:
            self._since_report = 1
        else:
            self._since_report = self._since_report + 1
        self._since_agreement += 1
        self.elapsed = self._since_report >= self._steps_per_report
        return self._since_agreement >= self._agree_after

    @property
    def median_s(self) -> float:
        """The median of this rank's recent step times, in seconds. The first step has no duration."""
        return statistics.median(self._recent)

    def agree(self, median_s: float) -> None:
        """Sets the number of steps per report.

        Args:
            median_s: the largest `median_s` of all ranks, the same on each of them.
        """
        steps = max(1, round(self._interval_s / max(median_s, _SHORTEST_STEP_S)))
        self._steps_per_report = steps
        self._agree_after = max(_FIRST_AGREEMENT, steps // _AGREEMENTS_PER_REPORT)
        self._since_agreement = 0
        self.elapsed = self._since_report >= steps
