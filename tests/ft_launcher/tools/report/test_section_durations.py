"""Sections beside their limits, from events written by hand."""

from __future__ import annotations

import pytest

from ft_launcher.tools.report.section_durations import LimitFit, SectionLimits, WatchedSection
from tests.ft_launcher.tools.report.lines import Line, begins, durations, end, found, limits, line, part, start, verdict


def only(*lines: Line) -> WatchedSection:
    (section,) = found([start(0), begins(1, 0), *lines, end(99)]).sections
    return section


def with_steps(t: float, times: int, longest_s: float, cycle: int = 0, since: float = 0) -> Line:
    return part(cycle, since, t, durations={"step": durations(times, longest_s)})


def test_cycles_are_added_up() -> None:
    section = only(with_steps(10, 600, 1.5), with_steps(20, 400, 7.0, cycle=1, since=10))
    assert (section.name, section.times, section.max_s) == ("step", 1000, 7.0)


def test_of_a_cycle_that_runs_the_last_line_counts() -> None:
    section = only(with_steps(10, 500, 1.5), with_steps(20, 900, 1.5), with_steps(30, 1200, 1.5))
    assert section.times == 1200


def test_nodes_and_attempts_are_added_up() -> None:
    lines = [start(0), begins(1, 0), with_steps(10, 500, 1.5), end(11)]
    again = [start(20), begins(21, 0), with_steps(30, 50, 2.0, since=20)]
    (section,) = found([*lines, *again], [start(0, "b"), *lines[1:]]).sections
    assert (section.times, section.max_s) == (1050, 2.0)


def test_what_is_seen_less_than_a_thousand_times_has_no_p999() -> None:
    assert only(with_steps(10, 999, 1.5)).p999_s is None
    assert only(with_steps(10, 1000, 1.5)).p999_s == 1.0
    assert only(part(0, 0, 10, durations={"step": durations(5000, 1.5) | {"buckets": []}})).p999_s is None


def test_the_last_limit_counts() -> None:
    configured = line("job_start", 0, run_id="job", node="a", limits={"sections": {"step": 60, "save": 5}})
    steps = with_steps(10, 500, 1.5)
    sections = found([configured, begins(1, 0), steps, limits(5, ["section:step"], step=30), end(9)]).sections
    assert [(known.name, known.limit_s, known.learned) for known in sections] == [("step", 30.0, True)]
    assert only(limits(5, step=30), limits(6, step=None), steps).limit_s is None


def test_how_often_a_limit_fired() -> None:
    fired = [
        verdict(5, 0, "section:step"),
        verdict(5, 0, "section:step"),
        verdict(6, 0, "section:save"),
        verdict(6, 0, "stall", condemned=False),
        line("interruption", 7, cycle=1, rank=0, limit="section:step", condemned=False),
        verdict(8, 2, "subsequent"),
    ]
    assert only(*fired, with_steps(10, 500, 1.5)).fired == 2


@pytest.mark.parametrize(
    ("times", "max_s", "limit_s", "fit"),
    [
        (99, 1.0, 60.0, LimitFit.TOO_FEW),
        (100, 1.0, None, LimitFit.UNWATCHED),
        (100, 1.0, 1.4, LimitFit.TIGHT),
        (100, 1.0, 1.5, LimitFit.GOOD),
        (100, 1.0, 20.0, LimitFit.GOOD),  # no limit below 10 s is proposed
        (100, 1.0, 20.1, LimitFit.LONG),
        (100, 60.0, 600.0, LimitFit.GOOD),
        (100, 60.0, 601.0, LimitFit.LONG),
    ],
)
def test_how_a_limit_fits(times: int, max_s: float, limit_s: float | None, fit: LimitFit) -> None:
    assert WatchedSection("step", times, None, max_s, limit_s, False, 0).fit is fit


def test_printed_steps_beside_their_limit() -> None:
    configured = line("job_start", 0, run_id="job", node="a", limits={"sections": {}, "log": 60.0})
    printed = [
        line("printed_steps", t, cycle=cycle, rank=0, durations={"printed step": durations(600, longest_s)})
        for cycle, (t, longest_s) in enumerate(((10, 4.0), (20, 2.0)))
    ]
    lines = [configured, begins(1, 0), printed[0], limits(11), verdict(12, 1, "log"), printed[1], end(30)]
    (section,) = found(lines).sections
    assert (section.name, section.times, section.max_s) == ("printed step", 1200, 4.0)
    assert (section.limit_s, section.fired, section.fit) == (60.0, 1, LimitFit.LONG)


def test_sections_with_limits_come_first() -> None:
    seen = {"data": durations(900, 1.0), "step": durations(500, 1.0), "save": durations(5, 1.0)}
    sections = found([start(0), begins(1, 0), limits(2, save=9), part(0, 0, 10, durations=seen), end(11)]).sections
    assert [known.name for known in sections] == ["save", "step", "data"]


@pytest.mark.parametrize(
    "wrong",
    [
        limits(5) | {"sections": [1], "learned": 3},
        limits(5, step=float("1e300")) | {"learned": None},
        line("limits", 5, sections={"step": "x", "save": True}),
        line("job_start", 5, run_id="job", node="a", limits=[]),
        line("verdict", 5, cycle=[], limit=5, condemned=True),
        part(0, 0, 10, durations={"step": {"count": 1}}),
    ],
    ids=lambda wrong: wrong["event"],
)
def test_a_line_that_does_not_fit(wrong: Line) -> None:
    section = only(wrong, with_steps(20, 500, 1.5, cycle=1, since=10))
    assert (section.times, section.limit_s, section.fired) == (500, None, 0)


def test_names_are_bounded() -> None:
    sections = SectionLimits()
    for number in range(1000):
        sections.ledger("a", number, part(0, 0, 1, durations={str(number): durations(2, 1.0)}))
        sections.limits(number, {"sections": {str(number): 1.0}})
    assert len(sections.watched()) == 256
