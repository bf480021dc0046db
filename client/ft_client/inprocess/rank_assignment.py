"""The rank assignments by their documented names. Those here decide from this rank's own numbers, without the store."""

from __future__ import annotations

from bisect import bisect_left
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
from ft_client.inprocess.assignment.group_filter import FilterCountGroupedByKey, FilterGroupedByKey
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
        limit = self.max_active_world_size
        limit_activity(ctx.state, lambda size: size if limit is None else min(size, limit))
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
