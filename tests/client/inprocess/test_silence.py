"""Silent nodes, on a table of looks."""

from __future__ import annotations

import pytest

from ft_client.inprocess.silence import Silence


@pytest.mark.parametrize(
    ("looks", "lost"),
    [
        ([(0, 1), (2, 2), (4, 3), (6, 4)], [[], [], [], []]),  # it beats
        ([(0, 1), (2, 1), (4, 1), (6, 1)], [[], [], ["n"], []]),  # it is silent, and is lost once
        ([(0, 0), (2, 0), (4, 0), (6, 0)], [[], [], [], []]),  # it never beat
        ([(0, 1), (100, 1), (101, 2)], [[], [], []]),  # the reader was stopped: of a long step only a part counts
        ([(0, 1), (2, 1), (4, 1), (5, 2), (7, 2), (9, 2)], [[], [], ["n"], [], [], ["n"]]),  # back, and lost again
    ],
)
def test_looks(looks: list[tuple[float, int]], lost: list[list[str]]) -> None:
    silence = Silence(timeout_s=3, longest_step_s=2.5)
    assert [silence.look({"n": counter}, now) for now, counter in looks] == lost
