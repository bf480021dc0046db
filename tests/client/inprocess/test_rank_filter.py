"""Filters as older documentation has them: state in, state out."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from ft_client.inprocess import rank_filter
from ft_client.inprocess.compose import Compose
from ft_client.inprocess.rank_assignment import RankAssignmentCtx, ShiftRanks, assign
from ft_client.inprocess.state import Mode, State


@pytest.mark.parametrize(
    ("one", "rank", "active_rank", "size"),
    [
        (rank_filter.MaxActiveWorldSize(3), 2, 2, 3),
        (rank_filter.MaxActiveWorldSize(3), 3, None, 3),
        (rank_filter.MaxActiveWorldSize(None), 9, 9, 10),
        (rank_filter.ActiveWorldSizeDivisibleBy(4), 7, 7, 8),
        (rank_filter.WorldSizeDivisibleBy(4), 8, None, 8),
        (rank_filter.WorldSizeDivisibleBy(), 9, 9, 10),
        (Compose(rank_filter.WorldSizeDivisibleBy(2), rank_filter.MaxActiveWorldSize(5)), 4, None, 4),
    ],
)
def test_filters(one: rank_filter.RankFilter, rank: int, active_rank: int | None, size: int) -> None:
    assert isinstance(one, rank_filter.RankFilter)
    state = one(State(rank, 10))
    assert (state.active_rank, state.active_world_size) == (active_rank, size)
    assert state.mode is (Mode.INACTIVE if active_rank is None else Mode.ACTIVE)


def test_a_filter_that_returns_nothing() -> None:
    both = rank_filter.filtered(ShiftRanks(), lambda state: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="rank_filter returned None"):
        assign(both, RankAssignmentCtx(State(0, 2), HashStore(), set()))
