"""The rank assignments by their documented names.

`restart/assigning.py` calls the one that the user chose, before each call of the function. All but
`FilterCountGroupedByKey` and `Tree` decide from this rank's own numbers, without the store. `Tree` gathers the keys of
all ranks at its first call; `assignment/topology.py` decides.
"""

from __future__ import annotations

import datetime
import json
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence, Set

from ft_client.inprocess.assignment.base import (
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    RankFilter,
    activate,
    forget_activity,
    limit_activity,
)
from ft_client.inprocess.assignment.topology import KeyOrFn, Layer, LayerFlag, Topology, check_key, group_key
from ft_client.inprocess.exception import InternalError
from ft_client.inprocess.state import Mode, State

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

logger = logging.getLogger(__name__)
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
        limit_activity(ctx.state, lambda size: min(size, self.max_active_world_size or size))
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


class Tree(RankAssignment):
    """Numbers and activates ranks within a tree of layers. It cannot be composed with other rank assignments.

    After a loss, in this order: a branch with fewer healthy ranks than `min_ranks` is terminated; a terminated active
    rank is replaced by a spare of its nearest RESERVE branch, or else by the last active rank of its BACKFILL branch;
    the remaining gaps are closed; `world_size_filter` makes the last active ranks spares.

    Args:
        layers: from the root, which all ranks share, down.
        world_size_filter: returns how many ranks shall be active, given how many could be.

    Raises:
        TypeError: an item is not a `Layer`.
        ValueError: there are no layers.
    """

    def __init__(self, layers: Sequence[Layer], world_size_filter: Callable[[int], int] | None = None) -> None:
        self.layers, self.world_size_filter = list(layers), world_size_filter
        for layer in self.layers:
            if not isinstance(layer, Layer):
                raise TypeError(f"{layer!r} in layers is not a Layer")
        if not self.layers:
            raise ValueError("layers is empty")
        self._topology: Topology | None = None

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context with this rank's new numbers.

        Raises:
            RankDiscarded: this rank is terminated, or its branch is too small.
            ValueError: ranks have different keys in the first layer, or the filter returned an impossible number.
            InternalError: another rank assignment changed the state since the last call.
            RuntimeError: the store is lost, or a rank did not call in time.
        """
        state = ctx.state
        if state.rank is None or state.rank in ctx.terminated_ranks:
            raise RankDiscarded(f"rank {state.rank} is terminated")
        if self._topology is None or state.mode is Mode.INITIALIZED:
            self._topology = self._gathered(ctx)
            self._topology.start(self.world_size_filter)
        else:
            self._check_unchanged(state)
            self._topology.lose(ctx.terminated_ranks, self.world_size_filter)
        self._write(state, self._topology)
        ctx.terminated_ranks = set()
        return ctx

    def _gathered(self, ctx: RankAssignmentCtx) -> Topology:
        state = ctx.state
        assert state.rank is not None and state.initial_rank is not None
        healthy = [rank for rank in range(state.world_size) if rank not in ctx.terminated_ranks]
        mine = json.dumps([state.initial_rank, *(group_key(layer.key_or_fn, state) for layer in self.layers)])
        found = ctx.gathers.make(healthy, state.rank, mine, None)
        paths = {int(rank): path for rank, *path in map(json.loads, found)}
        if len(paths) != len(healthy):
            raise InternalError(f"{len(healthy)} ranks have {len(paths)} different initial ranks")
        topology = Topology(self.layers, paths)
        place = topology.initial_ranks.index(state.initial_rank)
        if place != healthy.index(state.rank):
            logger.warning("rank %s of the environment is number %s of the topology", state.rank, place)
        return topology

    def _check_unchanged(self, state: State) -> None:
        assert self._topology is not None and state.initial_rank is not None
        leaf = self._topology.leaf(state.initial_rank)
        if (state.rank, state.active_rank, state.mode) != (leaf.rank, leaf.active_rank, leaf.mode):
            raise InternalError(f"Tree cannot be composed with other rank assignments: {state} is not its work")

    def _write(self, state: State, topology: Topology) -> None:
        assert state.initial_rank is not None
        leaf = topology.leaf(state.initial_rank)
        if leaf.mode is Mode.TERMINATED:
            raise RankDiscarded(f"a branch of rank {state.rank} has fewer healthy ranks than its min_ranks")
        state.rank, state.world_size = leaf.rank, topology.world_size
        state.mode, state.active_rank = leaf.mode, leaf.active_rank
        state.active_world_size = topology.active_world_size


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
