"""Decides after which steps a save is due, the same on all ranks. Pure.

With a fixed interval, a save is due after each step whose number the interval divides, or which is the first behind
such a step. With AUTO, the interval follows from what a save costs: the smallest with which saves take less than
`MAX_SHARE` of the time. Each rank measures its own cost, and the largest interval that a rank wishes for counts. The
ranks agree upon it at the beginning of each save, so the cost of a save counts from the save after it on:

- the first save is due after the first step: it also makes the files, and costs much more than the others;
- the second and the third are due `_FIRST_INTERVAL` steps after the one before;
- from then on the interval follows from the costs, without the first one's.

After a fault that a bad state may have caused no save is due before the training has passed the step of that fault,
whatever the interval (`memory_files.no_save_name`). From that step on saves are due as if the training had begun there.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from rank_monitor.contract.memory_files import AUTO

MAX_SHARE = 0.01
"""The part of the training's time that saves may take."""
_FIRST_INTERVAL = 10
_COSTS = 3
"""The median of so many saves counts: one save that met a busy machine does not change the interval."""


class SaveSteps:
    """Counts the steps of one training, from a call of `load` on.

    Args:
        interval: steps between two saves; AUTO: by the cost.
        start: the step from which the training goes on.
        not_until: the step that the training must pass before a save is due; 0: none.
    """

    def __init__(self, interval: int, start: int, not_until: int = 0) -> None:
        self._is_auto = interval == AUTO
        self._interval = interval
        if self._is_auto:
            self._interval = 1
        self._last = max(start, not_until)
        """The step of the last save, or the one from which saves may be due."""
        self._saves = 0
        self._costs_s: deque[float] = deque(maxlen=_COSTS)
        self._went_on_at_s: float | None = None
        """When the training went on after the last save, or was first seen (monotonic seconds)."""
        self._went_on_after = start
        """The step after which that was."""
        self._step_s = 0.0
        """How long a step took before the last save, without what the save before it has cost."""
        self.wish = _FIRST_INTERVAL
        """The interval that this rank would choose."""

    def is_due(self, step: int, now: float) -> bool:
        """Returns whether to save after `step`. The same on all ranks.

        `now`: monotonic seconds of this rank.
        """
        if self._went_on_at_s is None:
            self._went_on_at_s = now
            self._went_on_after = step
        if self._is_auto:
            return step >= self._last + self._interval
        return step // self._interval > self._last // self._interval

    def saved(self, step: int, began: float, ended: float, cost_s: float) -> None:
        """Notes a save, also one that has failed.

        Args:
            step: after which the save was.
            began: when the save began (monotonic seconds).
            ended: when the training went on.
            cost_s: how much of that time the save has cost. The wait for ranks that came later does not count: this
                rank would have waited for them in the next step.
        """
        self._saves += 1
        if self._saves > 1:
            self._costs_s.append(cost_s)
        assert self._went_on_at_s is not None
        self._step_s = (began - self._went_on_at_s) / max(1, step - self._went_on_after)
        self._went_on_at_s = ended
        self._went_on_after = step
        self._last = step
        self._choose()

    def cost_more(self, cost_s: float) -> None:
        """Notes that the last save has held up the training once more since it went on: by so many seconds."""
        if self._went_on_at_s is not None:
            self._went_on_at_s += cost_s
        if self._costs_s and self._saves > 1:
            self._costs_s[-1] += cost_s
            self._choose()

    def _choose(self) -> None:
        if self._costs_s and self._step_s > 0:
            self.wish = max(1, math.ceil(median(self._costs_s) / (MAX_SHARE * self._step_s)))

    def left_out(self, step: int) -> None:
        """Notes that no save was made after a step, where one was due."""
        self._last = step

    def agree(self, interval: int) -> None:
        """Notes the interval that the ranks have agreed upon: the largest that any of them wished for."""
        if self._is_auto:
            self._interval = interval
