"""Failures in a row: how long they last, and when they are said."""

from __future__ import annotations

import pytest

from ft_launcher.nodes.connections import Failures


@pytest.mark.parametrize(
    ("times", "lasted_s", "said"),
    [
        ([(0, 0)], 0, [0]),
        ([(0, 0), (1, 1)], 1, [0, 1]),
        ([(at, at) for at in range(0, 130, 10)], 120, [0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]),
        ([(0, 0), (1, 20)], 0, [0, 0]),
        ([(0, 0), (1, 20), (21, 21)], 1, [0, 0, 1]),
    ],
    ids=["one", "two", "for minutes", "a wait that was cut", "failures after a wait"],
)
def test_what_fails_at_once_again_and_again(times: list[tuple[int, int]], lasted_s: int, said: list[int]) -> None:
    failures = Failures(soon_s=2)
    assert [int(failures.failed(began, now, "why")) for began, now in times] == said
    assert failures.lasted_s == lasted_s
    failures.worked()
    assert failures.lasted_s == 0
