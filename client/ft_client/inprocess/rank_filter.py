"""Rank filters as NVIDIA's older documentation has them: they take and return a state.

Users make one for `Wrapper(rank_filter=...)`; `arguments.py` puts it after the rank assignment. New code uses the
filters of the same names in `rank_assignment.py`, which take a context, do the same, and can be composed with rank
assignments. Two of NVIDIA's modules have these names, so both of ours do.
"""

from __future__ import annotations

import abc
from collections.abc import Callable

from ft_client.inprocess.rank_assignment import RankAssignmentCtx, at_least, limit_activity
from ft_client.inprocess.state import State


class RankFilter(abc.ABC):
    """Decides which ranks are active, from a state. The class of `rank_assignment.py` decides from a context."""

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Returns the state, this rank being active or a spare."""


class MaxActiveWorldSize(RankFilter):
    """Makes at most this many ranks active; None: no limit. For `rank_filter=`."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        self.max_active_world_size = at_least(1, "max_active_world_size", max_active_world_size)

    def __call__(self, state: State) -> State:
        """Returns the state, this rank being active or a spare."""
        limit_activity(state, lambda size: min(size, self.max_active_world_size or size))
        return state


class ActiveWorldSizeDivisibleBy(RankFilter):
    """Makes the largest number of ranks active that is divisible by `divisor`. For `rank_filter=`."""

    def __init__(self, divisor: int = 1) -> None:
        self.divisor = at_least(1, "divisor", divisor) or 1

    def __call__(self, state: State) -> State:
        """Returns the state, this rank being active or a spare."""
        limit_activity(state, lambda size: size - size % self.divisor)
        return state


WorldSizeDivisibleBy = ActiveWorldSizeDivisibleBy
"""The older name of `ActiveWorldSizeDivisibleBy`."""


def filtered(
    assignment: Callable[[RankAssignmentCtx], RankAssignmentCtx], rank_filter: Callable[[State], State]
) -> Callable[[RankAssignmentCtx], RankAssignmentCtx]:
    """Returns a rank assignment with a filter after it: what `rank_assignment=` and `rank_filter=` mean together.

    Calling it raises:
        TypeError: the filter returned something else than a state.
    """

    def assign_and_filter(ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        ctx = assignment(ctx)
        state: object = rank_filter(ctx.state)
        if not isinstance(state, State):
            raise TypeError(f"rank_filter returned {state!r}, not a State")
        ctx.state = state
        return ctx

    return assign_and_filter
