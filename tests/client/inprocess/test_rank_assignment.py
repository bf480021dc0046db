"""Renumbering and filters: the documented pictures, properties of any loss, what an assignment may not return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from ft_client.inprocess.compose import Compose
from ft_client.inprocess.exception import InternalError, RestartAbort
from ft_client.inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    ShiftRanks,
    assign,
)
from ft_client.inprocess.state import Mode, State
from tests.client.inprocess.ranks import Ranks, check_consecutive

Maker = Callable[[], RankAssignment]


def composed(*parts: RankAssignment) -> Maker:
    return lambda: Compose(*parts)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("assignment", "world_size", "losses", "picture"),
    [
        (composed(ActivateAllRanks(), ShiftRanks()), 4, [[]], "0 1 2 3"),
        (composed(ActivateAllRanks(), ShiftRanks()), 8, [[1, 4, 5]], "0 2 3 6 7"),
        (composed(ActivateAllRanks(), ShiftRanks()), 8, [[], [1, 4, 5], [0]], "2 3 6 7"),
        (composed(ActivateAllRanks(), ShiftRanks()), 1, [[]], "0"),
        (composed(ActivateAllRanks(), FillGaps()), 8, [[1, 4, 5]], "0 6 2 3 7"),
        (composed(ActivateAllRanks(), FillGaps()), 8, [[5, 6, 7]], "0 1 2 3 4"),
        (composed(ActivateAllRanks(), FillGaps()), 8, [[0, 1, 2]], "5 6 7 3 4"),
        (composed(ActivateAllRanks(), FillGaps()), 8, [[0], [0]], "6 1 2 3 4 5"),
        (composed(MaxActiveWorldSize(3), ShiftRanks()), 5, [[]], "0 1 2 | 3 4"),
        (composed(MaxActiveWorldSize(3), ShiftRanks()), 5, [[], [1]], "0 2 3 | 4"),
        (composed(MaxActiveWorldSize(3), ShiftRanks()), 5, [[], [1], [0], [0]], "3 4"),
        (composed(MaxActiveWorldSize(None), ShiftRanks()), 3, [[]], "0 1 2"),
        (composed(ActiveWorldSizeDivisibleBy(2), ShiftRanks()), 5, [[]], "0 1 2 3 | 4"),
        (composed(ActiveWorldSizeDivisibleBy(2), ShiftRanks()), 5, [[], [0]], "1 2 3 4"),
        (composed(ActiveWorldSizeDivisibleBy(), FillGaps()), 3, [[0]], "2 1"),
        (composed(ActiveWorldSizeDivisibleBy(4), MaxActiveWorldSize(7), ShiftRanks()), 8, [[]], "0 1 2 3 | 4 5 6 7"),
        (
            composed(ActiveWorldSizeDivisibleBy(4), MaxActiveWorldSize(7), ShiftRanks()),
            8,
            [[], [0, 1]],
            "2 3 4 5 | 6 7",
        ),
        (
            composed(MaxActiveWorldSize(7), ActiveWorldSizeDivisibleBy(4), ShiftRanks()),
            12,
            [[]],
            "0 1 2 3 4 5 6 | 7 8 9 10 11",
        ),
        (composed(MaxActiveWorldSize(2)), 4, [[], []], "0 1 | 2 3"),
        (composed(ShiftRanks()), 3, [[1]], "0 2"),
    ],
)
def test_pictures(assignment: Maker, world_size: int, losses: list[list[int]], picture: str) -> None:
    ranks = Ranks(world_size, assignment)
    for terminated in losses:
        ranks.step(terminated)
    assert ranks.picture() == picture
    check_consecutive(ranks.states.values())


RENUMBERINGS = [ShiftRanks(), FillGaps()]


@st.composite
def losses(draw: st.DrawFn) -> tuple[int, list[set[int]]]:
    """A world, and the ranks that are lost in each of a few steps, by their present numbers."""
    world_size = size = draw(st.integers(1, 40))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        steps.append(draw(st.sets(st.integers(0, size - 1), max_size=size - 1)))
        size -= len(steps[-1])
    return world_size, steps


@settings(deadline=None, max_examples=150)
@given(losses(), st.sampled_from(RENUMBERINGS), st.integers(1, 12), st.integers(1, 5))
def test_any_loss(world: tuple[int, list[set[int]]], renumbering: RankAssignment, largest: int, divisor: int) -> None:
    world_size, steps = world
    assignment = Compose(ActiveWorldSizeDivisibleBy(divisor), MaxActiveWorldSize(largest), renumbering)
    states = [State(rank, world_size) for rank in range(world_size)]
    for terminated in steps:
        before = [state.initial_rank for state in states if state.rank not in terminated]
        after = []
        expected = min(len(before), largest) // divisor * divisor
        for state in states:
            is_out = state.rank in terminated
            try:
                after.append(assign(assignment, RankAssignmentCtx(state, HashStore(), set(terminated))))
                assert not is_out and expected > 0
            except RankDiscarded:
                assert is_out
            except RestartAbort:
                assert expected == 0
        if expected == 0:
            return
        check_consecutive(after)
        assert sorted(state.initial_rank or 0 for state in after) == sorted(one or 0 for one in before)
        assert {state.active_world_size for state in after} == {expected}
        states = after


@settings(deadline=None, max_examples=150)
@given(losses())
def test_who_keeps_what(world: tuple[int, list[set[int]]]) -> None:
    """Shifting keeps the order; filling gaps keeps every number that still exists."""
    world_size, (terminated, *_) = world
    healthy = [rank for rank in range(world_size) if rank not in terminated]
    for renumbering in RENUMBERINGS:
        new = {}
        for rank in healthy:
            ctx = renumbering(RankAssignmentCtx(State(rank, world_size), HashStore(), set(terminated)))
            new[rank] = ctx.state.rank
            assert ctx.terminated_ranks == set()
        if isinstance(renumbering, ShiftRanks):
            assert list(new.values()) == list(range(len(healthy)))
        else:
            assert all(new[rank] == rank for rank in healthy if rank < len(healthy))
            assert sorted(rank or 0 for rank in new.values()) == list(range(len(healthy)))


def test_a_terminated_rank_is_discarded() -> None:
    for renumbering in RENUMBERINGS:
        with pytest.raises(RankDiscarded, match="rank 2 is terminated"):
            renumbering(RankAssignmentCtx(State(2, 4), HashStore(), {2}))


@pytest.mark.parametrize("kind", [MaxActiveWorldSize, ActiveWorldSizeDivisibleBy])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-3, ValueError), ("2", TypeError), (True, TypeError)])
def test_silly_sizes(kind: Callable[[object], object], value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=str(value)):
        kind(value)


@pytest.mark.parametrize("renumbering", RENUMBERINGS)
def test_many_ranks(renumbering: RankAssignment) -> None:
    world_size = 16_384
    terminated = set(range(0, world_size, 3))
    last = max(rank for rank in range(world_size) if rank not in terminated)
    ctx = RankAssignmentCtx(State(last, world_size), HashStore(), terminated)
    state = assign(Compose(MaxActiveWorldSize(8192), renumbering), ctx)
    assert (state.world_size, state.active_world_size) == (world_size - len(terminated), 8192)


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
