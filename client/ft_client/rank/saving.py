"""Decides when to save: the same answer on all ranks, by the clock of rank 0 alone.

All ranks must save after the same step, and their clocks differ. So rank 0 decides and broadcasts. A broadcast in each
step would cost too much: with each answer rank 0 also says for how many further calls no rank needs to ask, by the mean
time of a call so far.

`RankMonitorClient` owns one schedule for each call of the training's function. Who writes the checkpoint is not known
here.
"""

from __future__ import annotations

from collections.abc import Mapping

from ft_client.rank.agreement import group
from rank_monitor.contract import env

_SHARE = 0.5
"""The part of the calls that are left, by the mean so far, after which rank 0 looks at its clock again."""
_MAX_CALLS = 64
"""Calls without a look at the clock. Steps may become much slower than those so far; a save is late by so many steps at
most. One broadcast of a number in 64 steps is not noticed: it takes as long as a small gradient."""
_NEVER = -1
"""Stands in the place of the number of calls that need not ask: no call will ever ask."""


def interval_of(setting: float | str | None, environ: Mapping[str, str]) -> float | None:
    """Returns the seconds between two saves; None: never.

    Args:
        setting: the launcher's setting. With `auto` the launcher has chosen the interval for this cycle.
        environ: the environment of this process, which has the chosen interval.
    """
    if isinstance(setting, str):
        try:
            setting = float(environ.get(env.SAVE_INTERVAL, ""))
        except ValueError:
            return None
    return setting


class SaveSchedule:
    """Counts calls of `is_due`, which all ranks make after the same steps."""

    def __init__(self) -> None:
        self._skip = 0
        """How many further calls need not ask rank 0."""
        self._calls = 0
        """Calls since `_since`."""
        self._since: float | None = None
        """The first call after the last save (monotonic seconds of this rank); None: there was none yet."""

    def is_due(self, interval_s: float | None, now: float) -> bool:
        """Returns whether `interval_s` seconds have passed since the first call after the last save, or since the first
        call of all. The same on all ranks. Collective, but not in every call.

        Args:
            interval_s: seconds; None: never. The value of rank 0 counts: a rank whose monitor did not answer knows
                none.
            now: monotonic seconds of this rank; those of rank 0 count.
        """
        if self._skip == _NEVER:
            return False
        self._calls += 1
        if self._since is None:
            self._since, self._calls = now, 0
        if self._skip:
            self._skip -= 1
            return False
        calls = _NEVER
        if interval_s is not None:
            calls = self._left(interval_s, now)
        self._skip = int(group.from_rank0(calls))
        if self._skip == _NEVER:
            return False
        if self._skip:
            self._skip -= 1
            return False
        self._since = None
        return True

    def _left(self, interval_s: float, now: float) -> int:
        """Returns how many calls, this one included, need no look at the clock; 0: it is time to save."""
        assert self._since is not None
        left_s = interval_s - (now - self._since)
        if not self._calls:
            return 1
        mean_s = (now - self._since) / self._calls
        if left_s <= mean_s / 2:  # a save after the next step would be farther from the interval
            return 0
        return max(1, int(min(_MAX_CALLS, _SHARE * left_s / max(mean_s, 1e-9))))
