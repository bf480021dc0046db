"""The part of a journal that fits."""

from __future__ import annotations

import pytest

from ft_launcher.tools.commands.bundle import Slice


@pytest.mark.parametrize(
    ("most", "kept", "left_out"),
    [
        (1000, list(range(10)), 0),
        (80, [0, *range(3, 10)], 2),
        (40, [7, 8, 9], 7),
        (0, [], 10),
    ],
)
def test_the_first_and_the_latest_lines_are_kept(most: int, kept: list[int], left_out: int) -> None:
    found = Slice(most)
    for number in range(10):
        found.add(b"%09d\n" % number)
    assert ([int(line) for line in found.lines()], found.left_out) == (kept, left_out)
    assert sum(map(len, found.lines())) <= most


def test_a_line_that_is_too_long_is_left_out() -> None:
    found = Slice(100)
    for line in (b"x" * 1000, b"short\n"):
        found.add(line)
    assert (found.lines(), found.left_out) == ([b"short\n"], 1)
