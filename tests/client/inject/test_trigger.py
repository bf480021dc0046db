"""When a fault fires, as tables: what the training shows, and at which of it the fault fires."""

from __future__ import annotations

import random

import pytest

from ft_client.inject.trigger import Source, StepCount, Trigger
from rank_monitor.contract.settings.injection import parse

HEARTBEATS, OPTIMIZER_STEPS, STEP_SECTIONS, ITERATIONS = Source


def trigger(text: str) -> Trigger:
    return Trigger(parse(f"kind:sigkill,{text}"), random.Random(1), 100.0)


def test_the_best_source_counts() -> None:
    count = StepCount()
    assert count.reached(HEARTBEATS) == range(1, 2)
    assert count.reached(HEARTBEATS) == range(2, 3)
    assert count.reached(OPTIMIZER_STEPS) == range(1, 2), "of a better source the first is step 1"
    assert count.reached(HEARTBEATS) is None
    assert count.reached(STEP_SECTIONS) == range(1, 2)
    assert count.reached(ITERATIONS, 500) == range(500, 501), "what lies before was not trained here"
    assert count.reached(ITERATIONS, 503) == range(501, 504), "reported now and then"
    assert count.reached(ITERATIONS, 503) is None
    assert count.reached(ITERATIONS, 400) == range(400, 401), "resumed in process"
    assert count.reached(OPTIMIZER_STEPS) is None


def test_of_several_optimizers_the_one_ahead_counts() -> None:
    count = StepCount()
    seen = [count.reached(OPTIMIZER_STEPS, who=who) for who in ("a", "b", "a", "b", "b")]
    assert seen == [range(1, 2), None, range(2, 3), None, range(3, 4)]


@pytest.mark.parametrize(
    ("text", "steps", "fires_at"),
    [
        ("step:3", [1, 2, 3, 4], 3),
        ("step:0", [0, 1], 0),
        ("step:3", [4, 5], None),
        ("step:3,delay:2", [1, 2, 3, 4], 3),
        ("step:3,delay:5", [1, 2, 3, 4, 5, 6], 5),
        ("p:1", [7, 8], 7),
        ("p:1,step:3", [1, 2, 3], 3),
        ("section:a", [1, 2], None),
        ("section:a,step:1", [1, 2], None),
    ],
)
def test_steps(text: str, steps: list[int], fires_at: int | None) -> None:
    """A second passes with each step."""
    fault = trigger(text)
    fired = [step for step in steps if fault.on_step(range(step, step + 1), 100.0 + step)]
    assert fired == ([] if fires_at is None else [fires_at])


def test_a_step_that_was_passed_over_fires() -> None:
    assert trigger("step:3").on_step(range(1, 6), 100.0)


@pytest.mark.parametrize(
    ("text", "events", "fires_at"),
    [
        ("section:a", ["b", "a", "a"], 1),
        ("section:a,delay:2", ["a", "a", "a", "a"], 2),
        ("section:a,step:2", ["a", 1, "a", 2, "b", "a"], 5),
        ("step:1", ["a", "a"], None),
    ],
)
def test_sections(text: str, events: list[str | int], fires_at: int | None) -> None:
    fault, fired = trigger(text), []
    for number, event in enumerate(events):
        now_s = 100.0 + number
        if isinstance(event, int):
            assert not fault.on_step(range(event, event + 1), now_s)
        elif fault.on_section(event, now_s):
            fired.append(number)
    assert fired == ([] if fires_at is None else [fires_at])


@pytest.mark.parametrize(
    ("text", "delay_s"),
    [("cycle:any", 0.0), ("delay:2.5", 2.5), ("delay:1,step:1", None), ("section:a", None), ("p:0.5", None)],
)
def test_by_time_alone(text: str, delay_s: float | None) -> None:
    assert trigger(text).by_time_s == delay_s


def test_the_mean_time_between_faults_is_a_mean() -> None:
    dice = random.Random(3)
    drawn = [Trigger(parse("kind:sigkill,mtbf:60"), dice, 0.0).by_time_s or 0.0 for _ in range(2000)]
    assert 55 < sum(drawn) / len(drawn) < 65


def test_a_probability_is_of_each_step() -> None:
    fault, dice = parse("kind:sigkill,p:0.1"), random.Random(3)
    lives = []
    for _ in range(1000):
        drawn = Trigger(fault, dice, 0.0)
        lives.append(next(step for step in range(1, 10_000) if drawn.on_step(range(step, step + 1), 0.0)))
    assert 9 < sum(lives) / len(lives) < 11
