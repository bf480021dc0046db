"""One account of several journals: nodes that tell of the same time, a lost coordinator, attempts in a row."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.record.ledger.account import MAX_POINTS, Account, cycle_times, thinned
from ft_launcher.record.ledger.attempts import account_of
from tests.ft_launcher.tools.report.lines import collected

Line = dict[str, Any]


def start(t: float) -> Line:
    return {"t": t, "event": "job_start"}


def end(t: float) -> Line:
    return {"t": t, "event": "job_end"}


def begins(t: float, node_rank: int, cycle: int = 0) -> Line:
    return {"t": t, "event": "cycle_start", "node_rank": node_rank, "cycle": cycle}


def part(cycle: int | None, since: float, until: float, **facts: Any) -> Line:
    """An event `ledger`; what is not named in `seconds` is `launch`."""
    seconds = dict(facts.pop("seconds", {}))
    seconds["launch"] = until - since - sum(seconds.values())
    return {"t": until, "event": "ledger", "cycle": cycle, "since": since, "until": until, "seconds": seconds} | facts


def steps(cycle: int, since: float, until: float, first: int, last: int, step_s: float = 1.0) -> Line:
    """A part with the steps from `first` to `last`, each reported when it was done."""
    count = last - first + 1
    points = [[first - 1, 0.0], [last, count * step_s]]
    seconds = {"step": count * step_s}
    return part(cycle, since, until, seconds=seconds, steps=count, resumed=first - 1, points=points, iteration=last)


def merged(journals: list[list[Line]]) -> Account:
    """The account of a job whose journals have these lines."""
    return account_of(collected(*([{"v": 1} | line for line in lines] for lines in journals), in_turn=True).times())


def rounded(journals: list[list[Line]]) -> dict[str, float]:
    found = merged(journals)
    assert math.isclose(sum(found.seconds.values()), found.wall_s)
    return {name: round(spent_s, 6) for name, spent_s in found.seconds.items() if round(spent_s, 6)}


def test_one_journal() -> None:
    lines = [start(100), begins(105, 0), steps(0, 100, 130, 0, 9), steps(1, 130, 150, 5, 14), part(None, 150, 151)]
    journal = [*lines, end(151)]
    found = merged([journal])
    assert (found.wall_s, found.steps) == (51, 20)
    assert rounded([journal]) == {"step": 15, "lost_progress": 5, "launch": 31}
    assert found.goodput == pytest.approx(15 / 51)


def test_the_moment_in_which_the_end_is_written_is_not_of_the_job() -> None:
    journal = [start(100), steps(0, 100, 130, 0, 9), part(None, 130, 131) | {"t": 131.5}, end(132)]
    assert rounded([journal]) == {"step": 10, "launch": 21}


def test_two_attempts_and_the_queue_between_them() -> None:
    """What the second attempt did again counts against the first."""
    first = [start(100), steps(0, 100, 130, 0, 9), end(130)]
    second = [start(400), steps(0, 400, 420, 8, 12), end(420)]
    expected = {"step": 8 + 5, "lost_progress": 2, "reschedule": 270, "launch": 20 + 15}
    assert rounded([first, second]) == rounded([second, first]) == rounded([[*first, *second]]) == expected
    assert merged([first, second]).wall_s == 320


def test_nodes_that_tell_of_the_same_time_count_once() -> None:
    one = [start(100), begins(105, 0), steps(0, 100, 130, 0, 9), steps(1, 130, 150, 5, 14), end(150)]
    other = [start(101), begins(105, 1), steps(0, 101, 130.2, 0, 9), steps(1, 130.2, 150.5, 5, 14), end(150.5)]
    found = merged([other, one])
    assert found.wall_s == 50.5
    assert found.seconds["step"] == pytest.approx(15, abs=0.4)
    assert found.seconds["lost_progress"] == pytest.approx(5, abs=0.1)


def test_a_lost_coordinator_loses_no_time() -> None:
    """The journal of node 0 ends with its host; the other node tells of the time."""
    lost = [start(100), begins(105, 0), steps(0, 100, 130, 0, 9), begins(132, 0, 1), {"t": 140, "event": "verdict"}]
    other = [start(100), begins(105, 1), steps(0, 100, 130, 0, 9), steps(1, 130, 170, 10, 29), end(170)]
    expected = {"step": 30, "launch": 40}
    assert rounded([lost, other]) == expected
    assert merged([lost, other]).wall_s == 70


def test_a_spare_that_waits_does_not_stand_for_the_job() -> None:
    spare = [start(99), part(None, 99, 200, seconds={"rendezvous": 100}), end(200)]
    active = [start(100), begins(105, 0), steps(0, 100, 199, 0, 79), end(199)]
    found = merged([spare, active])
    assert found.seconds["step"] == pytest.approx(80)
    assert found.seconds["rendezvous"] == pytest.approx(2, rel=0.02)


def test_a_launcher_that_was_killed_leaves_unknown_time() -> None:
    killed = [start(100), begins(105, 0), steps(0, 100, 130, 0, 9), {"t": 180, "event": "rank_exit"}]
    again = [start(200), steps(0, 200, 210, 10, 14), end(210)]
    assert rounded([killed, again]) == {"step": 15, "launch": 25, "unknown": 50, "reschedule": 20}


def test_a_part_that_was_told_while_its_cycle_ran_is_replaced() -> None:
    journal = [start(100), steps(0, 100, 120, 0, 4), steps(0, 100, 130, 0, 9), end(130)]
    assert rounded([journal]) == {"step": 10, "launch": 20}


def test_no_journal() -> None:
    assert merged([]).wall_s == 0
    assert merged([[], [{"event": "x"}, {"t": "now"}]]).goodput == 0


WRONG: list[Line] = [
    {"seconds": None},
    {"seconds": {"step": -1.0}},
    {"seconds": {"step": float("nan")}},
    {"seconds": {"x" * 200: 1.0}},
    {"seconds": {str(number): 1.0 for number in range(300)}},
    {"since": "yesterday"},
    {"until": 0},
    {"steps": 1.5},
    {"saves": 1.5},
    {"cycle": "0"},
    {"resumed": True},
    {"points": {}},
    {"points": [[1]]},
    {"points": [[1, 2]] * 300},
    {"points": [["1", 2]]},
    {"saved_s": "x"},
    {"recovery": [1]},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:40])
def test_a_line_that_does_not_fit_is_ignored(wrong: Line) -> None:
    assert cycle_times(steps(0, 100, 130, 0, 9)) is not None
    assert cycle_times(steps(0, 100, 130, 0, 9) | wrong) is None


def test_points_in_a_journal_are_few_and_keep_both_ends() -> None:
    points = [(number, float(number)) for number in range(1000)]
    found = thinned(points)
    assert len(found) <= MAX_POINTS and found[0] == points[0] and found[-1] == points[-1]


@st.composite
def journals(draw: st.DrawFn) -> list[Line]:
    """The journal of one node: parts one after the other, perhaps of several launches, perhaps cut off."""
    lines: list[Line] = []
    now = draw(st.floats(0, 50))
    for _ in range(draw(st.integers(1, 3))):
        lines.append(start(now))
        for cycle in range(draw(st.integers(0, 4))):
            length = draw(st.floats(0.5, 30))
            count = draw(st.integers(0, 8))
            first = draw(st.integers(0, 10))
            if draw(st.booleans()):
                lines.append(begins(now, draw(st.integers(0, 3)), cycle))
            lines.append(steps(cycle, now, now + length, first, first + count, length / (count + 2)))
            now += length
        now += draw(st.floats(0, 10))
        lines.append(draw(st.sampled_from([end, start]))(now))
        now += draw(st.floats(0, 60))
    return lines


@given(st.lists(journals(), min_size=1, max_size=3))
def test_whatever_journals_there_are_no_second_is_lost_or_counts_twice(given_journals: list[list[Line]]) -> None:
    found = merged(given_journals)
    moments = [line["t"] for lines in given_journals for line in lines]
    assert math.isclose(found.wall_s, max(moments) - min(moments), abs_tol=1e-6)
    assert min(found.seconds.values(), default=0) >= -1e-9
    assert 0 <= found.goodput <= 1
