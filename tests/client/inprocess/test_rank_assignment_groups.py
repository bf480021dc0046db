"""Groups of which too few ranks are left: pictures, over a real store."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest

from ft_client.inprocess.compose import Compose
from ft_client.inprocess.rank_assignment import (
    ActivateAllRanks,
    FilterCountGroupedByKey,
    FilterGroupedByKey,
    RankAssignment,
    ShiftRanks,
)
from tests.client.inprocess.ranks import Ranks, check_consecutive


def pairs(condition: Callable[[int], bool] = lambda count: count == 2) -> Callable[[], RankAssignment]:
    """Pairs of neighbours stand and fall together."""
    return lambda: Compose(  # type: ignore[return-value]
        ActivateAllRanks(), ShiftRanks(), FilterCountGroupedByKey(lambda state: state.rank // 2, condition)
    )


@pytest.mark.parametrize(
    ("losses", "picture"),
    [
        ([[]], "0 1 2 3 4 5 6 7"),
        ([[1, 4, 5]], "2 3 6 7"),
        ([[], [1]], "2 3 4 5 6 7"),
        ([[1], [5]], "2 3 4 5"),
        ([[], [0, 2, 4, 6]], ""),
    ],
)
def test_pictures(losses: list[list[int]], picture: str) -> None:
    ranks = Ranks(8, pairs())
    for terminated in losses:
        ranks.step(terminated)
    assert ranks.picture() == picture
    check_consecutive(ranks.states.values())
    assert ranks.keys_left() == 4 * len(losses)


def test_the_older_name_and_key() -> None:
    def older() -> RankAssignment:
        by_node = FilterGroupedByKey(key_or_fn=lambda rank, world_size: f"node{rank // 4}", condition=lambda n: n >= 3)
        return Compose(ShiftRanks(), by_node)  # type: ignore[return-value]

    ranks = Ranks(8, older)
    ranks.step([1, 4, 5])
    assert ranks.picture() == "0 2 3"


def test_two_filters_in_one_composition() -> None:
    def both() -> RankAssignment:
        return Compose(  # type: ignore[return-value]
            ShiftRanks(),
            FilterCountGroupedByKey(lambda state: state.rank // 4, lambda count: count >= 3),
            FilterCountGroupedByKey(lambda state: state.rank // 2, lambda count: count == 2),
        )

    ranks = Ranks(12, both)
    ranks.step([0])
    assert ranks.picture() == "4 5 6 7 8 9 10 11"


def test_a_condition_that_differs_from_rank_to_rank() -> None:
    """Each rank is asked, and all follow its answer."""

    def by_number() -> Callable[[], RankAssignment]:
        numbers = iter(range(6))

        def make() -> RankAssignment:
            number = next(numbers)
            return Compose(ShiftRanks(), FilterCountGroupedByKey("all", lambda count: number % 3 != 0))  # type: ignore[return-value]

        return make

    ranks = Ranks(6, by_number())
    ranks.step()
    assert ranks.picture() == "1 2 4 5"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"key_or_fn": [1], "condition": bool}, r"key_or_fn=\[1\]"),
        ({"key_or_fn": "a", "condition": 2}, "condition=2"),
        ({"key_or_fn": "a", "condition": bool, "timeout": 60}, "timeout=60"),
    ],
)
def test_wrong_types(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        FilterCountGroupedByKey(**given)


def test_the_documented_default() -> None:
    assert FilterCountGroupedByKey("a", bool).timeout == datetime.timedelta(seconds=60)
