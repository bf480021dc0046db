"""The interface of a rank assignment: the context it gets and returns, its base classes, and the call that applies it.

Pure but for the store in the context. Knows none of the assignments there are.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, field

from ft_client.inprocess.assignment.gather import Gathers, GatherStore
from ft_client.inprocess.exception import InternalError, RestartAbort, RestartError
from ft_client.inprocess.state import Mode, State


class RankDiscarded(RestartError):
    """This rank has no place in the next iteration."""


@dataclass
class RankAssignmentCtx:
    """The context of a rank assignment, which changes the context or returns one made from it by `dataclasses.replace`.

    Args:
        state: of this rank.
        store: keys of this one assignment only, seen by every rank that takes part.
        terminated_ranks: ranks, as `state.rank` counts them, that do not take part; the same set on every rank.

    `gathers` are those made through `store`.
    """

    state: State
    store: GatherStore
    terminated_ranks: set[int]
    gathers: Gathers = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.gathers = self.gathers or Gathers(self.store)


class RankAssignment(abc.ABC):
    """Decides, with the same result on every rank, which number each healthy rank gets in the next iteration."""

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context with what was decided.

        Raises:
            RankDiscarded: this rank is out.
        """


class RankFilter(RankAssignment):
    """Decides which ranks are active. Comes after (in a `Compose`: stands before) what changes their numbers."""


def activate(state: State, size: int) -> None:
    """Makes the first `size` ranks active, the others spares."""
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
    """Resets the activity to that at entry: which ranks are active is not decided."""
    state.mode, state.active_rank, state.active_world_size = Mode.INITIALIZED, None, None


def limit_activity(state: State, size: Callable[[int], int]) -> None:
    """Makes `size(n)` ranks active, n being those that are active so far; all, when none was chosen yet."""
    if state.active_world_size is None:
        activate(state, size(state.world_size))
    else:
        activate(state, size(state.active_world_size))


def assign(assignment: Callable[[RankAssignmentCtx], object], ctx: RankAssignmentCtx) -> State:
    """The state of this rank in the next iteration. When the assignment says nothing of activity, all are active.

    Raises:
        RankDiscarded: this rank is out.
        RestartAbort: no rank would be active, so there is nothing to wait for.
        GatherAbandoned: a rank that takes part is gone.
        InternalError: the terminated ranks do not exist, or the assignment left gaps or silly numbers.
        TypeError: it returned something else than a context.
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
