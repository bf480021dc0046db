"""A flag that rides in a reduction which the step makes anyway: two agreements for the price of one.

The rerun machine reduces its votes at the end of each run of a step; preemption asks right after. The flag is as old as
that reduction, so it counts only where steps are short and each is asked about; else its owner reduces it by itself, at
the moment it asks. Whether it counts is agreed in the same reduction, so that all ranks then do the same. Knows neither
tool.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ft_client import group

Flag: TypeAlias = Callable[[], bool]

SHORT_STEP_S = 0.25
"""Between two reductions of short steps; one more reduction is far below 1 % of a longer one."""


class Piggyback:
    """The flag of one process, and what all ranks last agreed on it. Every rank makes the same calls."""

    def __init__(self) -> None:
        self._flag: Flag | None = None
        self._last_s = -math.inf
        self._agreed: bool | None = None
        self._was_asked = False
        self._group: Callable[[], Any] = lambda: None

    def board(self, flag: Flag) -> None:
        """From now on this flag rides. One that rode goes: ranks that were started later may have none such."""
        self._flag, self._agreed, self._was_asked = flag, None, False

    def leave(self, flag: Flag) -> None:
        """This flag rides no more."""
        if self._flag == flag:
            self._flag = None

    def max_over_ranks(self, values: Sequence[float], now_s: float | None = None) -> list[float]:
        """As `group.max_over_ranks`, by one reduction that the flag rides in.

        Args:
            now_s: seconds of any clock of this rank; None: the monotonic one.
        """
        now_s = time.monotonic() if now_s is None else now_s
        since_s = now_s - self._last_s if self._was_asked else math.inf
        self._last_s, self._was_asked = now_s, False
        up, absent = (0.0, 1.0) if self._flag is None else (float(self._flag()), 0.0)
        *agreed, up, absent, longest_s = group.max_over_ranks([*values, up, absent, since_s])
        self._agreed = up > 0 if not absent and longest_s < SHORT_STEP_S else None
        self._group = group.reference()
        return agreed

    def taken(self, flag: Flag) -> bool | None:
        """What all ranks agreed on this flag, once; None: nothing since then, or they were of a group that is gone."""
        if self._flag != flag:
            return None
        agreed, self._agreed, self._was_asked = self._agreed, None, True
        now = group.reference()()
        return agreed if now is not None and self._group() is now else None


of_process = Piggyback()
