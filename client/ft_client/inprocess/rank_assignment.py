"""The rank assignments by their documented names.

`restart/assigning.py` calls the one that the user chose, before each call of the function. All but
`FilterCountGroupedByKey` and `Tree` decide from this rank's own numbers, without the store.
"""

from __future__ import annotations

import datetime
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Set

from ft_client.inprocess.assignment.base import (
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    RankFilter,
    activate,
    forget_activity,
    limit_activity,
)
from ft_client.inprocess.assignment.group_key import KeyOrFn, check_key, group_key
from ft_client.inprocess.assignment.layer import Layer, LayerFlag
from ft_client.inprocess.assignment.tree import Tree

__all__ = [
    "ActivateAllRanks",
    "ActiveWorldSizeDivisibleBy",
    "FillGaps",
    "FilterCountGroupedByKey",
    "FilterGroupedByKey",
    "Layer",
    "LayerFlag",
    "MaxActiveWorldSize",
    "RankAssignment",
    "RankAssignmentCtx",
    "RankDiscarded",
    "RankFilter",
    "ShiftRanks",
    "Tree",
]

_KEPT, _GIVEN_UP = "1", "0"


class ActivateAllRanks(RankFilter):
    """Every rank is active."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context, this rank being active."""
        activate(ctx.state, ctx.state.world_size)
        return ctx


class MaxActiveWorldSize(RankFilter):
    """Makes the first ranks active, up to a maximum.

    Args:
        max_active_world_size: None: no limit.
    """

    def __init__(self, max_active_world_size: int | None) -> None:
        self.max_active_world_size = at_least(1, "max_active_world_size", max_active_world_size)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context, this rank being active or a spare."""
        limit_activity(ctx.state, at_most(self.max_active_world_size))
        return ctx


class ActiveWorldSizeDivisibleBy(RankFilter):
    """Makes the first ranks active: the largest number of them that is divisible by `divisor`."""

    def __init__(self, divisor: int = 1) -> None:
        self.divisor = at_least(1, "divisor", divisor) or 1

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context, this rank being active or a spare."""
        limit_activity(ctx.state, lambda size: size - size % self.divisor)
        return ctx


class ShiftRanks(RankAssignment):
    """Closes the gaps that terminated ranks left; the order of the others stays: `0 X 2 3` becomes `0 1 2`."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context without terminated ranks.

        Raises:
            RankDiscarded: this rank is terminated.
        """
        return _renumber(ctx, shifted)


class FillGaps(RankAssignment):
    """Moves the last ranks into the gaps that terminated ranks left; the others stay: `0 X 2 3` becomes `0 3 2`."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context without terminated ranks.

        Raises:
            RankDiscarded: this rank is terminated.
        """
        return _renumber(ctx, filled)


class FilterCountGroupedByKey(RankAssignment):
    """Terminates the ranks of every group whose number of healthy ranks does not meet a condition.

    `ShiftRanks` or `FillGaps` comes after it (in a `Compose`: stands before it) and closes the gaps.

    Args:
        key_or_fn: the group of a rank: any hashable value, or a function of `(state)` or `(rank, world_size)`.
        condition: of the number of healthy ranks in the group; asked on each of them.
        timeout: for the others, in each of two gathers.
    """

    def __init__(
        self,
        key_or_fn: KeyOrFn,
        condition: Callable[[int], bool],
        timeout: datetime.timedelta = datetime.timedelta(seconds=60),
    ) -> None:
        check_key(key_or_fn)
        if not callable(condition):
            raise TypeError(f"condition={condition!r} is not a function")
        if not isinstance(timeout, datetime.timedelta):
            raise TypeError(f"timeout={timeout!r} is not a timedelta")
        self.key_or_fn, self.condition, self.timeout = key_or_fn, condition, timeout

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context, with the ranks of such groups among the terminated ones.

        Two gathers, since a condition may differ from rank to rank (`count == torch.cuda.device_count()`), and only
        what all know alike may enter the numbers.

        Raises:
            RuntimeError: the other ranks did not come in time, or the store is lost.
        """
        if ctx.state.rank in ctx.terminated_ranks:
            return ctx
        healthy = [rank for rank in range(ctx.state.world_size) if rank not in ctx.terminated_ranks]
        mine = group_key(self.key_or_fn, ctx.state)
        count = Counter(self._gather(ctx, healthy, mine))[mine]
        vote = _GIVEN_UP
        if self.condition(count):
            vote = _KEPT
        votes = self._gather(ctx, healthy, vote)
        given_up = {rank for rank, vote in zip(healthy, votes, strict=True) if vote == _GIVEN_UP}
        ctx.terminated_ranks = ctx.terminated_ranks | given_up
        return ctx

    def _gather(self, ctx: RankAssignmentCtx, ranks: list[int], value: str) -> list[str]:
        assert ctx.state.rank is not None
        return ctx.gathers.make(ranks, ctx.state.rank, value, self.timeout)


FilterGroupedByKey = FilterCountGroupedByKey
"""Its name in the older documentation."""


def shifted(rank: int, _world_size: int, terminated: Set[int]) -> int:
    """The new number of a healthy rank when all close up."""
    return rank - sum(other < rank for other in terminated)


def filled(rank: int, world_size: int, terminated: Set[int]) -> int:
    """The new number of a healthy rank when the last ones, in order, take the gaps, in order."""
    size = world_size - len(terminated)
    if rank < size:
        return rank
    above = sorted(other for other in terminated if other >= size)
    gaps = sorted(other for other in terminated if other < size)
    return gaps[rank - size - bisect_left(above, rank)]


def at_most(limit: int | None) -> Callable[[int], int]:
    """A function that returns the number it is given, or the limit where that is smaller; None: no limit."""

    def limited(size: int) -> int:
        if limit is None:
            return size
        return min(size, limit)

    return limited


def at_least(least: int, name: str, value: int | None) -> int | None:
    """`value`, a whole number of at least `least` or None.

    Raises:
        TypeError: it is something else.
        ValueError: it is below that.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise TypeError(f"{name}={value!r} is not a whole number")
    if value is not None and value < least:
        raise ValueError(f"{name}={value} is below {least}")
    return value


def _renumber(ctx: RankAssignmentCtx, number: Callable[[int, int, Set[int]], int]) -> RankAssignmentCtx:
    """Sets the new number of this rank, and resets which ranks are active."""
    state, terminated = ctx.state, ctx.terminated_ranks
    if state.rank is None or state.rank in terminated:
        raise RankDiscarded(f"rank {state.rank} is terminated")
    state.rank = number(state.rank, state.world_size, terminated)
    state.world_size -= len(terminated)
    forget_activity(state)
    ctx.terminated_ranks = set()
    return ctx
