"""After which steps a save is due."""

from __future__ import annotations

import itertools

import pytest

from ft_client.memory.save_steps import MAX_SHARE, SaveSteps
from rank_monitor.contract.memory_files import AUTO


def run(steps: SaveSteps, start: int, end: int, step_s: float, cost_s: float, first_cost_s: float) -> list[int]:
    """The steps after which there was a save, in a training with such times."""
    now, saves = 0.0, []
    for step in range(start + 1, end + 1):
        now += step_s
        if not steps.is_due(step, now):
            continue
        steps.agree(steps.wish)
        began = now
        now += cost_s if saves else first_cost_s
        saves.append(step)
        steps.saved(step, began, now, now - began)
    return saves


@pytest.mark.parametrize(("start", "expected"), [(0, [5, 10, 15, 20]), (7, [10, 15, 20]), (10, [15, 20])])
def test_a_fixed_interval_divides_the_steps(start: int, expected: list[int]) -> None:
    assert run(SaveSteps(5, start), start, 22, 1.0, 100.0, 100.0) == expected


@pytest.mark.parametrize(("interval", "expected"), [(5, [25, 30]), (AUTO, [24, 34])])
def test_nothing_is_saved_before_the_step_of_the_fault_is_passed(interval: int, expected: list[int]) -> None:
    assert run(SaveSteps(interval, 10, not_until=23), 10, 34, 1.0, 1.0, 1.0) == expected
    later = SaveSteps(interval, 30, not_until=23)
    assert run(later, 30, 35, 1.0, 1.0, 1.0)[0] == {5: 35, AUTO: 31}[interval]


def test_a_training_that_counts_by_threes_is_saved_as_often() -> None:
    steps, saves = SaveSteps(5, 0), []
    for step in range(3, 25, 3):
        if steps.is_due(step, float(step)):
            saves.append(step)
            steps.saved(step, float(step), float(step), 0.0)
    assert saves == [6, 12, 15, 21]


def test_the_interval_by_cost_keeps_saves_below_one_percent() -> None:
    saves = run(SaveSteps(AUTO, 0), 0, 10_000, step_s=0.1, cost_s=0.05, first_cost_s=0.5)
    assert saves[:3] == [1, 11, 21]
    later = [after - before for before, after in itertools.pairwise(saves[2:])]
    assert later
    assert all(0.05 / (interval * 0.1) <= MAX_SHARE for interval in later)
    assert all(0.05 / ((interval - 2) * 0.1) > MAX_SHARE for interval in later), "and not rarer than it must be"


def test_a_wait_of_the_optimizer_counts_as_cost() -> None:
    """A save of 0.01 s, for which the optimizer then waits for 0.04 s, is as rare as one of 0.05 s."""
    steps, now = SaveSteps(AUTO, 0), 0.0
    for step in range(1, 200):
        now += 0.1
        if step % 10 == 2:
            steps.cost_more(0.04)
            now += 0.04
        if step % 10 == 1:
            steps.is_due(step, now)
            steps.saved(step, now, now + 0.01, 0.01)
            now += 0.01
    assert steps.wish == pytest.approx(0.05 / (0.1 * MAX_SHARE), abs=1)


def test_a_cheap_save_is_made_after_every_step() -> None:
    saves = run(SaveSteps(AUTO, 0), 0, 100, step_s=1.0, cost_s=0.001, first_cost_s=0.01)
    assert saves == [1, 11, *range(21, 101)]


def test_the_wait_for_a_rank_that_came_later_is_no_cost() -> None:
    """That rank needs all of the time; this one waits for it in the save, or else in the next step."""
    steps, now = SaveSteps(AUTO, 0), 0.0
    for step in range(1, 40):
        now += 1.0
        if steps.is_due(step, now):
            steps.agree(10)
            steps.saved(step, now, now + 0.1, 0.001)
            now += 0.1
    assert steps.wish == 1


def test_one_slow_save_does_not_change_the_interval() -> None:
    steps = SaveSteps(AUTO, 0)
    wishes = []
    for step, cost_s in [(1, 0.5), (11, 0.1), (31, 0.1), (51, 9.0), (71, 0.1)]:
        assert steps.is_due(step, now=step)
        steps.agree(10)
        steps.saved(step, step, step + cost_s, cost_s)
        wishes.append(steps.wish)
    assert wishes[0] == 10
    assert all(wish <= 20 for wish in wishes), wishes


def test_a_step_that_goes_backwards_is_not_due() -> None:
    steps = SaveSteps(5, 20)
    assert not steps.is_due(15, 1.0)
    assert not steps.is_due(20, 2.0)
    assert steps.is_due(25, 3.0)
    auto = SaveSteps(AUTO, 20)
    assert not auto.is_due(19, 1.0)
    assert auto.is_due(21, 2.0)
