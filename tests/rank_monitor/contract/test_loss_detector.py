"""Lost nodes, on a table of readings: the launcher's nodes and those of a job without launcher follow the same rule."""

from __future__ import annotations

import pytest

from rank_monitor.contract.loss_detector import LossDetector

Readings = list[tuple[float, int | None]]


@pytest.mark.parametrize(
    ("readings", "lost"),
    [
        pytest.param([(2, 1), (4, 2), (6, 3), (8, 4)], [], id="it beats"),
        pytest.param([(2, 1), (4, 1), (6, 1), (8, 1)], [8], id="it stops"),
        pytest.param([(2, 1), (4, 1), (6, 1), (8, 1), (10, 1), (12, 2)], [8], id="it is lost once"),
        pytest.param([(2, None), (4, None), (6, None)], [6], id="it never beat"),
        pytest.param([(2, 1), (4, None), (6, None), (8, None)], [8], id="its counter is gone"),
        pytest.param([(2, 9), (4, 8), (6, 9), (8, 0)], [], id="its counter goes back"),
        pytest.param([(2, 1), (3600, 1), (3602, 2)], [], id="the reader was stopped"),
        pytest.param([(2, 1), (3600, 1), (3601, 1), (3602, 1)], [3602], id="of a long step, 4 s count"),
        pytest.param([(3600, None), (3602, None), (3604, None)], [3604], id="the first reading is not a step"),
    ],
)
def test_readings(readings: Readings, lost: list[float]) -> None:
    detector = LossDetector(limit_s=6, longest_step_s=4)
    found = []
    for now, counter in readings:
        if now == readings[0][0]:
            detector.watch(["n"], now - 2)
        if detector.read({"n": counter}, now):
            found.append(now)
    assert found == lost


def test_nodes_are_judged_each_by_itself() -> None:
    detector = LossDetector(limit_s=6, longest_step_s=4)
    detector.watch(["a", "b"], 0)
    assert detector.next_loss() == 6
    assert detector.read({"a": 1}, 2) == []
    assert detector.next_loss() == 6
    assert detector.read({"a": 2}, 6) == ["b"]
    assert detector.nodes == ["a"]
    assert detector.next_loss() == 12
    detector.watch([], 6)
    assert detector.next_loss() is None


def test_a_node_that_is_watched_anew_has_its_whole_time_and_the_others_keep_theirs() -> None:
    detector = LossDetector(limit_s=6, longest_step_s=4)
    detector.watch(["a", "b"], 0)
    detector.read({"a": 1, "b": 1}, 2)
    detector.watch(["b", "c"], 6)
    assert detector.read({"b": 1}, 6) == []
    assert detector.read({"b": 1}, 8) == ["b"]
    assert detector.read({}, 12) == ["c"]
    detector.watch(["b"], 14)
    assert detector.read({"b": 1}, 14) == [], "it is watched again"
    assert detector.read({"b": 1}, 18) == []
    assert detector.read({"b": 1}, 20) == ["b"]


def test_both_numbers_may_be_set_anew() -> None:
    detector = LossDetector(limit_s=6, longest_step_s=4)
    detector.watch(["n"], 0)
    detector.read({"n": 1}, 1)
    detector.limit_s, detector.longest_step_s = 2, 1
    assert detector.read({"n": 1}, 9) == [], "1 of these 8 s counts"
    assert detector.read({"n": 1}, 10) == ["n"]
