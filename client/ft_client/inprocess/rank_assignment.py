"""Rank assignments by their documented names, the interface of one, and `assign`, which applies it.

A rank assignment gives each rank its number in the next round, after ranks were lost or have joined. Users choose one
by the wrapper's argument `rank_assignment`; `restart/assigning.py` applies it on every rank before each round. Every
rank computes its own numbers, and the numbers of all ranks must fit together: so an assignment may use only what all
ranks know alike.

`FilterCountGroupedByKey` and `Tree` gather values of all ranks through the store of the context; for `Tree`,
`assignment/topology.py` decides. All other assignments here decide from this rank's own numbers, within microseconds.

Example: 8 ranks train, 2 wait as spares, and a lost rank is replaced by a spare:

    Wrapper(rank_assignment=Compose(MaxActiveWorldSize(8), FillGaps()))     # the last callback runs first
"""

from __future__ import annotations

import abc
import datetime
import json
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from ft_client.inprocess.assignment.gather import Gathers
from ft_client.inprocess.assignment.topology import KeyOrFn, Topology, check_key, group_key
from ft_client.inprocess.assignment.topology import Layer as Layer  # noqa: PLC0414 (a public name here)
from ft_client.inprocess.assignment.topology import LayerFlag as LayerFlag  # noqa: PLC0414 (a public name here)
from ft_client.inprocess.exception import InternalError, RestartAbort, RestartError
from ft_client.inprocess.state import Mode, State
from rank_monitor.contract.rounds.barrier import Store

logger = logging.getLogger(__name__)
_KEPT, _GIVEN_UP = "1", "0"
"""A rank's vote on its group in `FilterCountGroupedByKey`."""


class RankDiscarded(RestartError):
    """This rank has no number in the next round: its call ends, and the other ranks go on without it."""


@dataclass
class RankAssignmentCtx:
    """The argument of a rank assignment. It changes the context, or returns a copy made by `dataclasses.replace`.

    Args:
        state: the state of this rank.
        store: a store with the keys of this one assignment, shared by every rank that takes part.
        terminated_ranks: values of `state.rank` of ranks that do not take part; the same set on every rank.
        gathers: the gathers made through `store`; made from it by default.
    """

    state: State
    store: Store
    terminated_ranks: set[int]
    gathers: Gathers = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.gathers = self.gathers or Gathers(self.store)


class RankAssignment(abc.ABC):
    """Decides which number each healthy rank gets in the next round.

    The base class of rank assignments. It is called on every rank, with this rank's state. The numbers that it gives to
    all ranks together must be 0 to `world_size` - 1, each once.
    """

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context with the new state of this rank, and without terminated ranks.

        Raises:
            RankDiscarded: this rank does not take part in the next round.
        """


class RankFilter(RankAssignment):
    """Decides which ranks are active, after other assignments have numbered them: `Compose` runs the last one first.

    The name is of NVIDIA's module `inprocess.rank_assignment`. `rank_filter.py` has the class of the same name that
    NVIDIA's module `inprocess.rank_filter` has: that one takes a state, this one a context.
    """


class ActivateAllRanks(RankFilter):
    """Every rank is active."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context, this rank being active."""
        activate(ctx.state, ctx.state.world_size)
        return ctx


class MaxActiveWorldSize(RankFilter):
    """Makes the first ranks active, up to a maximum; all others become spares.

    This is the class for `rank_assignment=`; the one of `rank_filter.py` is for `rank_filter=`.

    Args:
        max_active_world_size: how many ranks are active at most; None: no limit.
    """

    def __init__(self, max_active_world_size: int | None) -> None:
        self.max_active_world_size = at_least(1, "max_active_world_size", max_active_world_size)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context, this rank being active or a spare."""
        limit_activity(ctx.state, lambda size: min(size, self.max_active_world_size or size))
        return ctx


class ActiveWorldSizeDivisibleBy(RankFilter):
    """Makes the first ranks active: the largest number of them that is divisible by `divisor`.

    This is the class for `rank_assignment=`; the one of `rank_filter.py` is for `rank_filter=`.

    Args:
        divisor: the number of ranks of one replica of the model, for instance.
    """

    def __init__(self, divisor: int = 1) -> None:
        self.divisor = at_least(1, "divisor", divisor) or 1

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context, this rank being active or a spare."""
        limit_activity(ctx.state, lambda size: size - size % self.divisor)
        return ctx


class ShiftRanks(RankAssignment):
    """Closes the gaps that terminated ranks left, in the ranks' order: of `0 X 2 3`, ranks 2 and 3 become 1 and 2.

    The default. Neighbours stay neighbours, but most ranks get another number.
    """

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context without terminated ranks.

        Raises:
            RankDiscarded: this rank is terminated.
        """
        return _renumber(ctx, shifted)


class FillGaps(RankAssignment):
    """Moves the last ranks into the gaps that terminated ranks left: of `0 X 2 3`, rank 3 becomes 1, and 2 stays 2.

    Most ranks keep their number, and with it their shard of the data or model. Spares, which have the last numbers,
    take the places of lost ranks.
    """

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context without terminated ranks.

        Raises:
            RankDiscarded: this rank is terminated.
        """
        return _renumber(ctx, filled)


class FilterCountGroupedByKey(RankAssignment):
    """Terminates the ranks of every group whose number of healthy ranks does not meet a condition.

    For instance: a node that has lost one of its 8 ranks gives up the other 7. `ShiftRanks` or `FillGaps` must come
    after this assignment, and closes the gaps; in a `Compose` it stands before:

        Compose(ShiftRanks(), FilterCountGroupedByKey(socket.gethostname(), lambda count: count == 8))

    Args:
        key_or_fn: the group of a rank: any hashable value, or a function of `(state)` or `(rank, world_size)`.
        condition: takes the number of healthy ranks in the group, and returns whether the group stays. Asked on each of
            the group's ranks; one no is enough.
        timeout: how long to wait for the other ranks, in each of two gathers.
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
        """Returns the context, with the ranks of such groups among the terminated ranks.

        The first gather collects the groups, the second the answers of the condition: a condition may differ from rank
        to rank (`count == torch.cuda.device_count()`), and only what all ranks know alike may enter the numbers.

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
        """Returns the value of each rank, in the order of `ranks`. Collective over these ranks."""
        assert ctx.state.rank is not None
        return ctx.gathers.make(ranks, ctx.state.rank, value, self.timeout)


FilterGroupedByKey = FilterCountGroupedByKey
"""The name of `FilterCountGroupedByKey` in NVIDIA's older documentation."""


class Tree(RankAssignment):
    """Numbers and activates ranks within a tree of layers. It cannot be composed with other rank assignments.

    After a loss, in this order:

    1. A branch with fewer healthy ranks than `min_ranks` is terminated as a whole.
    2. A terminated active rank is replaced by a spare of its nearest branch with RESERVE; else by the last active rank
       of its branch with BACKFILL.
    3. The remaining gaps are closed.
    4. `world_size_filter` makes the last active ranks spares.

    Example: nodes of 8 ranks, of which a whole node is given up with a rank, and 16 ranks train:

        Tree([
            Layer(min_ranks=16, max_ranks=16, flag=LayerFlag.RESERVE),
            Layer(min_ranks=8, max_ranks=8, key_or_fn=socket.gethostname(), flag=LayerFlag.RESERVE),
        ])

    The tree is kept from round to round. It is gathered anew when a rank has joined, which has no memory of it.

    Args:
        layers: from the root, which all ranks share, down.
        world_size_filter: takes how many ranks could be active, and returns how many shall be.

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
        """Gathers the keys of all healthy ranks. Returns the tree that they make. Collective over these ranks."""
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
        """Checks that this rank's state is the one that the tree gave it in the last round."""
        assert self._topology is not None and state.initial_rank is not None
        leaf = self._topology.leaf(state.initial_rank)
        if (state.rank, state.active_rank, state.mode) != (leaf.rank, leaf.active_rank, leaf.mode):
            raise InternalError(f"Tree cannot be composed with other rank assignments: {state} is not its work")

    def _write(self, state: State, topology: Topology) -> None:
        """Writes what the tree decided for this rank into its state."""
        assert state.initial_rank is not None
        leaf = topology.leaf(state.initial_rank)
        if leaf.mode is Mode.TERMINATED:
            raise RankDiscarded(f"a branch of rank {state.rank} has fewer healthy ranks than its min_ranks")
        state.rank, state.world_size = leaf.rank, topology.world_size
        state.mode, state.active_rank = leaf.mode, leaf.active_rank
        state.active_world_size = topology.active_world_size


def shifted(rank: int, _world_size: int, terminated: Set[int]) -> int:
    """Returns the new number of a healthy rank when all ranks close up: its number less the terminated ranks below."""
    return rank - sum(other < rank for other in terminated)


def filled(rank: int, world_size: int, terminated: Set[int]) -> int:
    """Returns the new number of a healthy rank when the last ranks, in order, take the gaps, in order."""
    size = world_size - len(terminated)
    if rank < size:
        return rank
    above = sorted(other for other in terminated if other >= size)
    gaps = sorted(other for other in terminated if other < size)
    return gaps[rank - size - bisect_left(above, rank)]


def at_least(least: int, name: str, value: int | None) -> int | None:
    """Returns `value`, after a check that it is a whole number of at least `least`, or None.

    Args:
        least: the smallest number that is allowed.
        name: the argument's name, for the error.
        value: what the user gave.

    Raises:
        TypeError: the value is neither a whole number nor None.
        ValueError: the number is below `least`.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise TypeError(f"{name}={value!r} is not a whole number")
    if value is not None and value < least:
        raise ValueError(f"{name}={value} is below {least}")
    return value


def _renumber(ctx: RankAssignmentCtx, number: Callable[[int, int, Set[int]], int]) -> RankAssignmentCtx:
    """Sets the new number of this rank, and resets which ranks are active.

    Args:
        ctx: the context; changed in place.
        number: takes a rank, the world size and the terminated ranks; returns the rank's new number.
    """
    state, terminated = ctx.state, ctx.terminated_ranks
    if state.rank is None or state.rank in terminated:
        raise RankDiscarded(f"rank {state.rank} is terminated")
    state.rank = number(state.rank, state.world_size, terminated)
    state.world_size -= len(terminated)
    reset_activity(state)
    ctx.terminated_ranks = set()
    return ctx


def activate(state: State, size: int) -> None:
    """Sets whether this rank is active: the first `size` ranks are active, all others are spares."""
    if state.rank is None:
        raise InternalError("a terminated rank cannot be active")
    state.active_world_size = size
    if state.rank < size:
        state.mode = Mode.ACTIVE
        state.active_rank = state.rank
    else:
        state.mode = Mode.INACTIVE
        state.active_rank = None


def reset_activity(state: State) -> None:
    """Resets whether this rank is active to its value at entry: undecided."""
    state.mode, state.active_rank, state.active_world_size = Mode.INITIALIZED, None, None


def limit_activity(state: State, size: Callable[[int], int]) -> None:
    """Makes fewer of the active ranks active: the first `size(n)` of the n that are so far.

    Where no assignment has decided yet which ranks are active, n is the world size.
    """
    if state.active_world_size is None:
        activate(state, size(state.world_size))
    else:
        activate(state, size(state.active_world_size))


def assign(assignment: Callable[[RankAssignmentCtx], object], ctx: RankAssignmentCtx) -> State:
    """Calls the assignment and returns the state of this rank in the next round.

    Where the assignment leaves it undecided which ranks are active, all are. Blocks while the assignment gathers
    values. Called by `restart/assigning.py` in the main thread.

    Raises:
        RankDiscarded: this rank does not take part.
        RestartAbort: no rank would be active.
        GatherAbandoned: a rank that takes part is lost.
        InternalError: a terminated rank does not exist, or the result has gaps or impossible numbers.
        TypeError: the assignment did not return a context.
    """
    stray = sorted(rank for rank in ctx.terminated_ranks if not 0 <= rank < ctx.state.world_size)
    if stray:
        raise InternalError(f"terminated ranks {stray} do not exist: the world has {ctx.state.world_size}")
    result = assignment(ctx)
    if not isinstance(result, RankAssignmentCtx):
        raise TypeError(f"rank_assignment returned {result!r}, not a RankAssignmentCtx")
    state = result.state
    if result.terminated_ranks:
        if state.rank in result.terminated_ranks:
            raise RankDiscarded(f"rank {state.rank} is terminated")
        gaps = sorted(result.terminated_ranks)
        raise InternalError(f"rank_assignment left the terminated ranks {gaps} in place: end it by ShiftRanks")
    if state.mode is Mode.INITIALIZED:
        activate(state, state.world_size)
    _check(state)
    return state


def _check(state: State) -> None:
    """Checks the state that an assignment of the user made, so that its error shows here and not as a hang.

    Raises:
        RestartAbort: no rank would be active.
        InternalError: a number is impossible, or numbers and mode do not fit together.
    """
    size = state.active_world_size
    if size == 0:
        raise RestartAbort(f"none of {state.world_size} ranks would be active")
    is_sane = (
        state.rank is not None
        and size is not None
        and 0 <= state.rank < state.world_size
        and size <= state.world_size
        and state.mode in {Mode.ACTIVE, Mode.INACTIVE}
        and (state.active_rank is not None) == (state.mode is Mode.ACTIVE)
        and (state.active_rank is None or 0 <= state.active_rank < size)
    )
    if not is_sane:
        raise InternalError(f"rank_assignment made no possible state: {state}")
