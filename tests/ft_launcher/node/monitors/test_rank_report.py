"""What a monitor reports of its rank is kept for the process and the cycle that it is about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ft_launcher.node.monitors.rank_report import RankReport, has_left_its_wait
from rank_monitor.contract.wire.launcher_messages import STALL, CycleStart, Snapshot, Times, Verdict
from rank_monitor.contract.wire.messages import RankException
from rank_monitor.contract.wire.rank_times import RankTimes

CYCLE, PID, SENT_NS, NOW = 3, 100, 7_000_000_000, 7.5
CONDEMNED = Verdict(CYCLE, 0, PID, "section:step", 5.0, 5.5, False, 7, {}, "no progress", "line", [], {}, True)
STALLED = replace(CONDEMNED, limit=STALL, condemned=False)
OTHER_CYCLE = replace(CONDEMNED, cycle=CYCLE - 1)


@pytest.fixture
def report() -> RankReport:
    return RankReport(CycleStart(CYCLE, 0, PID, 1, ""))


def test_the_first_exception_is_the_cause(report: RankReport) -> None:
    first, later = (RankException(kind, "text", "", at) for kind, at in (("ValueError", 1.0), ("RuntimeError", 2.0)))
    assert report.note(first, SENT_NS, NOW) is first
    assert report.note(later, SENT_NS, NOW + 1.0) is later
    assert (report.exception, report.exception_at) == (first, NOW)


@pytest.mark.parametrize(
    ("verdicts", "kept"),
    [
        ([CONDEMNED], CONDEMNED),
        ([STALLED], STALLED),
        ([STALLED, CONDEMNED], CONDEMNED),
        ([CONDEMNED, STALLED], CONDEMNED),
        ([replace(STALLED, limit="soft_timeout")], None),
        ([OTHER_CYCLE], None),
    ],
    ids=["condemned", "stall", "a stall that goes on", "a stall after it", "a restart is asked for", "another cycle"],
)
def test_a_verdict_explains_the_end_of_its_cycle(
    report: RankReport, verdicts: list[Verdict], kept: Verdict | None
) -> None:
    for verdict in verdicts:
        expected = None if verdict.cycle != CYCLE else verdict
        assert report.note(verdict, SENT_NS, NOW) is expected
    assert report.verdict is kept


def test_a_reading_is_no_snapshot_of_the_end(report: RankReport) -> None:
    reading, snapshot = (Snapshot(token, True, True, 7, {}, 0.1) for token in (-1, 1))
    assert report.note(reading, SENT_NS, NOW) is None
    assert report.snapshot is None
    assert report.note(snapshot, SENT_NS, NOW) is None
    assert (report.snapshot, report.reading, report.reading_at) == (snapshot, reading, NOW)


@pytest.mark.parametrize(
    ("message", "is_kept"),
    [
        (Times(CYCLE, PID, RankTimes().json()), True),
        (Times(CYCLE, PID + 1, RankTimes().json()), False),
        (Times(CYCLE - 1, PID, RankTimes().json()), False),
        (Times(CYCLE, PID, {}), False),
    ],
    ids=["its own", "an earlier process", "an earlier cycle", "no ledger"],
)
def test_a_time_ledger_is_that_of_this_process(report: RankReport, message: Times, is_kept: bool) -> None:
    assert report.note(message, SENT_NS, NOW) is None
    assert (report.times is not None) is is_kept


def in_groups(**groups: tuple[int, int]) -> Snapshot:
    """The state of a rank by the collectives that it has entered and finished in each group."""
    found = {name: {"entered": entered, "finished": finished} for name, (entered, finished) in groups.items()}
    return Snapshot(0, True, True, -1, {}, None, groups=found)


@pytest.mark.parametrize(
    ("before", "now", "has_left"),
    [
        (in_groups(world=(4, 3)), in_groups(world=(4, 4)), True),
        (in_groups(world=(4, 3), tp=(9, 9)), in_groups(world=(4, 4), tp=(9, 9)), True),
        (in_groups(world=(4, 3)), in_groups(world=(4, 3)), False),
        (in_groups(world=(4, 3)), in_groups(world=(5, 4)), False),
        (in_groups(world=(4, 3), tp=(9, 9)), in_groups(world=(4, 4), tp=(10, 9)), False),
        (in_groups(world=(4, 4)), in_groups(world=(4, 4)), False),
        (in_groups(world=(4, 3)), in_groups(), False),
        (in_groups(), in_groups(), False),
    ],
    ids=[
        "its wait failed",
        "in one of two groups",
        "still waits",
        "in the next collective",
        "in a collective of another group",
        "waited in none",
        "no answer of the recorder",
        "no group",
    ],
)
def test_a_rank_that_has_left_its_wait(before: Snapshot, now: Snapshot, has_left: bool) -> None:
    assert has_left_its_wait(before, now) is has_left
