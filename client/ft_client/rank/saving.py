"""When to save: the same answer on all ranks, by a clock that only rank 0 reads.

`RankMonitorClient` owns one schedule for each call of the training's function. Who writes the checkpoint is not known
here.
"""

from __future__ import annotations

from collections.abc import Mapping

from ft_client.rank.agreement import group
from rank_monitor.contract import env

_SHARE = 0.5
"""Of the calls that are left by the mean so far: then rank 0 looks again."""
_MAX_CALLS = 64
"""Without a look at the clock. Steps may become much slower than those so far; a save is late by so many at most. One
broadcast of a number in 64 steps is not noticed: it takes as long as a small gradient."""


_NEVER = -1
"""In the place of the number of calls that need not ask: none will ever ask."""


def interval_of(setting: float | str | None, environ: Mapping[str, str]) -> float | None:
    """Returns the seconds between two saves; None: never.

    Args:
        setting: that of the launcher. With `auto` it has chosen the interval for this cycle.
        environ: of this process.
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
        self._calls = 0
        self._since: float | None = None

    def is_due(self, interval_s: float | None, now: float) -> bool:
        """Whether `interval_s` seconds have passed since the first call after the last save, or since the first of all.

        The same on all ranks. Collective, but not in every call: rank 0 also says how many calls need not ask.

        Args:
            interval_s: None: never. That of rank 0 counts: a rank whose monitor did not answer knows of none.
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
