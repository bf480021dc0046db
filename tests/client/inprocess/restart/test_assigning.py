"""The numbers of a rank in each round: which assignments take no time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from ft_client.inprocess.compose import Compose
from ft_client.inprocess.rank_assignment import (
    ActivateAllRanks,
    FillGaps,
    FilterCountGroupedByKey,
    MaxActiveWorldSize,
    ShiftRanks,
)
from ft_client.inprocess.restart.assigning import Assigning


@pytest.mark.parametrize(
    ("assignment", "may_block"),
    [
        (Compose(ActivateAllRanks(), ShiftRanks()), False),
        (Compose(MaxActiveWorldSize(2), FillGaps()), False),
        (Compose(ShiftRanks(), FilterCountGroupedByKey(lambda state: "a", lambda count: True)), True),
        (lambda context: context, True),
    ],
    ids=["default", "gaps", "gathers", "own"],
)
def test_what_waits_for_others_or_is_the_users_may_block(assignment: Callable[..., Any], may_block: bool) -> None:
    store = HashStore()
    assert Assigning(assignment, store, store).may_block is may_block
