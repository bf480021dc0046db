"""Which objects of a job with another number of ranks count for every rank of this one."""

from __future__ import annotations

import pytest

from ft_client.memory.shard_ranges import CannotReshard
from ft_client.memory.shared_state import REPLICATED, SharedObjects, shared_objects


def test_what_was_the_same_on_all_ranks_is_taken_and_the_rest_begins_anew() -> None:
    told = {
        0: {"model": REPLICATED, "scheduler": "aa", "loader": "01", "mine": "02"},
        1: {"scheduler": "aa", "loader": "01", "mine": "03"},
    }
    found = shared_objects(told, ["model", "scheduler", "loader", "mine"], ["loader"], ["loader", "mine"])
    assert found == SharedObjects(0, ("model", "scheduler"), ("loader", "mine"))


def test_the_reference_is_the_lowest_rank_whose_file_has_all() -> None:
    told = {
        1: {"scheduler": "aa"},
        2: {"model": REPLICATED, "scheduler": "aa"},
        4: {"model": REPLICATED, "scheduler": "aa"},
    }
    assert shared_objects(told, ["model", "scheduler"], [], []).reference == 2


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({0: {"model": "aa"}, 1: {"model": "bb"}}, "model has values that are no DTensor"),
        ({1: {"scheduler": "aa"}}, "model is in no file"),
        ({}, "model is in no file"),
    ],
)
def test_what_differs_or_is_missing_is_refused_by_name(told: dict[int, dict[str, str]], text: str) -> None:
    with pytest.raises(CannotReshard, match=text):
        shared_objects(told, ["model"], [], [])


def test_where_no_file_has_all_nothing_is_taken() -> None:
    told = {0: {"model": "aa"}, 1: {"optimizer": "bb"}}
    with pytest.raises(CannotReshard, match="no file that is left has all of: model, optimizer"):
        shared_objects(told, ["model", "optimizer"], [], [])
