"""One application of a rank assignment: what it may be given, and what it may not return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from ft_client.inprocess.assignment.base import RankAssignmentCtx, RankDiscarded, assign
from ft_client.inprocess.compose import Compose
from ft_client.inprocess.exception import InternalError, RestartAbort
from ft_client.inprocess.rank_assignment import ActiveWorldSizeDivisibleBy, MaxActiveWorldSize, ShiftRanks
from ft_client.inprocess.state import Mode, State


def context(*terminated: int, rank: int = 1, world_size: int = 4) -> RankAssignmentCtx:
    return RankAssignmentCtx(State(rank, world_size), HashStore(), set(terminated))


def test_all_are_active_when_nothing_says_otherwise() -> None:
    state = assign(ShiftRanks(), context(0))
    assert (state.rank, state.active_rank, state.active_world_size, state.mode) == (0, 0, 3, Mode.ACTIVE)


def test_an_assignment_of_the_users() -> None:
    def reverse(ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        assert ctx.state.rank is not None
        return replace(ctx, state=replace(ctx.state, rank=ctx.state.world_size - 1 - ctx.state.rank))

    assert assign(Compose(MaxActiveWorldSize(2), reverse, ShiftRanks()), context()).mode is Mode.INACTIVE
    assert assign(Compose(MaxActiveWorldSize(2), reverse, ShiftRanks()), context(rank=3)).active_rank == 0


@pytest.mark.parametrize(
    ("terminated", "words"), [((4,), r"terminated ranks \[4\] do not exist"), ((-1, 2), r"\[-1\] do not exist")]
)
def test_ranks_that_do_not_exist(terminated: tuple[int, ...], words: str) -> None:
    with pytest.raises(InternalError, match=words):
        assign(ShiftRanks(), context(*terminated))


def test_gaps_that_are_left() -> None:
    with pytest.raises(InternalError, match=r"left the terminated ranks \[2\] in place"):
        assign(MaxActiveWorldSize(2), context(2))
    with pytest.raises(RankDiscarded):
        assign(MaxActiveWorldSize(2), context(1))


def test_nobody_active() -> None:
    with pytest.raises(RestartAbort, match="none of 3 ranks would be active"):
        assign(Compose(ActiveWorldSizeDivisibleBy(4), ShiftRanks()), context(0))


@pytest.mark.parametrize("result", [None, (State(1, 4), set()), State(1, 4)])
def test_another_result(result: object) -> None:
    with pytest.raises(TypeError, match="rank_assignment returned"):
        assign(lambda ctx: result, context())


@pytest.mark.parametrize(
    "state",
    [
        State(None, 4, mode=Mode.ACTIVE),
        State(4, 4, 0, 4, mode=Mode.ACTIVE),
        State(1, 4, 1, 5, mode=Mode.ACTIVE),
        State(1, 4, 2, 2, mode=Mode.ACTIVE),
        State(1, 4, None, 2, mode=Mode.ACTIVE),
        State(1, 4, 1, 2, mode=Mode.INACTIVE),
        State(1, 4, 1, None, mode=Mode.ACTIVE),
        State(1, 4, None, 2, mode=Mode.TERMINATED),
    ],
)
def test_states_that_cannot_be(state: State) -> None:
    def impossible() -> Callable[[RankAssignmentCtx], RankAssignmentCtx]:
        return lambda ctx: replace(ctx, state=state)

    with pytest.raises(InternalError, match="no possible state"):
        assign(impossible(), context())
