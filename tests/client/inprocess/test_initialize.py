"""`RetryController`: limits, and what is at them."""

from __future__ import annotations

import pytest

from ft_client.inprocess.exception import RestartAbort
from ft_client.inprocess.initialize import RetryController
from ft_client.inprocess.state import Mode, State


def state(iteration: int, world_size: int = 4, active: int | None = 4) -> State:
    return State(0, world_size, 0, active, iteration=iteration, mode=Mode.ACTIVE)


@pytest.mark.parametrize(
    ("limits", "given", "words"),
    [
        ({}, state(10**6), ""),
        ({}, state(0, 1, 1), ""),
        ({}, state(0, 4, 0), "0 ranks are active, below min_active_world_size=1"),
        ({}, state(0, 4, None), "0 ranks are active"),
        ({"max_iterations": 3}, state(2), ""),
        ({"max_iterations": 3}, state(3), "iteration=3 is beyond max_iterations=3"),
        ({"min_world_size": 4}, state(0), ""),
        ({"min_world_size": 5}, state(0), "4 ranks are left, below min_world_size=5"),
        ({"min_active_world_size": 4}, state(0), ""),
        ({"min_active_world_size": 4}, state(0, 4, 3), "3 ranks are active, below min_active_world_size=4"),
    ],
)
def test_limits(limits: dict[str, int], given: State, words: str) -> None:
    frozen = given.freeze()
    if not words:
        assert RetryController(**limits)(frozen) is frozen
        return
    with pytest.raises(RestartAbort, match=words):
        RetryController(**limits)(frozen)
