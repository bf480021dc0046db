"""When reports are due, with step times instead of time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from ft_client.straggler.interval import IntervalTracker


def run(interval_s: float, ranks: list[list[float]]) -> tuple[list[int], int]:
    """The steps at which all ranks report, and how often they agreed; `ranks` has step times by rank and step."""
    trackers = [IntervalTracker(interval_s) for _ in ranks]
    now = [0.0] * len(ranks)
    reports, agreements = [], 0
    for step, times in enumerate(zip(*ranks, strict=True)):
        now = [before + took for before, took in zip(now, times, strict=True)]
        due = {tracker.step(at) for tracker, at in zip(trackers, now, strict=True)}
        assert len(due) == 1
        if due == {True}:
            agreements += 1
            median = max(tracker.median_s for tracker in trackers)
            for tracker in trackers:
                tracker.agree(median)
        elapsed = {tracker.elapsed for tracker in trackers}
        assert len(elapsed) == 1
        if elapsed == {True}:
            reports.append(step)
    return reports, agreements


def gaps(steps: Iterable[int]) -> set[int]:
    return {after - before for before, after in itertools.pairwise(steps)}


def test_steady_steps() -> None:
    reports, agreements = run(10.0, [[0.1] * 1000])
    assert gaps(reports) == {100}
    assert 30 <= agreements <= 50


def test_the_slowest_rank_says_how_many_steps_an_interval_has() -> None:
    reports, _ = run(10.0, [[0.1] * 300, [0.5] * 300])
    assert gaps(reports) == {20}


def test_slow_first_steps_do_not_count_for_long() -> None:
    reports, _ = run(10.0, [[30.0, 5.0, 0.1] + [0.1] * 900])
    assert gaps(reports[1:]) == {100}


def test_steps_longer_than_the_interval() -> None:
    reports, agreements = run(10.0, [[60.0] * 40])
    assert (gaps(reports), agreements) == ({1}, 10)


def test_steps_that_become_slower() -> None:
    reports, _ = run(10.0, [[0.1] * 200 + [1.0] * 400])
    assert gaps(reports[-10:]) == {10}


@given(st.lists(st.lists(st.floats(0, 100), min_size=60, max_size=60), min_size=1, max_size=4))
def test_ranks_never_part(ranks: list[list[float]]) -> None:
    run(10.0, ranks)
