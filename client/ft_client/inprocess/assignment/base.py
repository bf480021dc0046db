"""The interface of a rank assignment: its context, its base classes, and `assign`, which applies it.

`restart/assigning.py` applies it before each iteration. The context holds a store, through which an assignment may
gather values of all ranks; nothing else here does I/O.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, field

from ft_client.inprocess.assignment.gather import Gathers
from ft_client.inprocess.exception import InternalError, RestartAbort, RestartError
from ft_client.inprocess.state import Mode, State
from rank_monitor.contract.iterations.barrier import Store


class RankDiscarded(RestartError):
    """This rank has no place in the next iteration."""


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
    """Decides which number each healthy rank gets in the next iteration. The result is the same on every rank."""

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context with the new state of this rank, and without terminated ranks.

        Raises:
            RankDiscarded: this rank does not take part in the next iteration.
        """


class RankFilter(RankAssignment):
    """Decides which ranks are active, after other assignments have numbered them: `Compose` runs the last one first."""


def activate(state: State, size: int) -> None:
    """Sets whether this rank is active: the first `size` ranks are, the others are spares."""
    if state.rank is None:
        raise InternalError("a terminated rank cannot be active")
    state.active_world_size = size
    if state.rank < size:
        state.mode = Mode.ACTIVE
        state.active_rank = state.rank
    else:
        state.mode = Mode.INACTIVE
        state.active_rank = None


def forget_activity(state: State) -> None:
    """Resets the activity to its value at entry: undecided."""
    state.mode, state.active_rank, state.active_world_size = Mode.INITIALIZED, None, None


def limit_activity(state: State, size: Callable[[int], int]) -> None:
    """Makes the first `size(n)` ranks active, where n ranks are active so far; n is the world size if undecided."""
    if state.active_world_size is None:
        activate(state, size(state.world_size))
    else:
        activate(state, size(state.active_world_size))


def assign(assignment: Callable[[RankAssignmentCtx], object], ctx: RankAssignmentCtx) -> State:
    """Calls the assignment and returns the state of this rank in the next iteration.

    Where the assignment leaves the activity undecided, all ranks are active. Blocks while it gathers values.

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
