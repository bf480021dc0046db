"""What a monitor reports of its rank is kept for the process and the cycle that it is about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ft_launcher.node.monitors.rank_report import Found
from rank_monitor.contract.wire.launcher_messages import STALL, CycleStart, Snapshot, Times, Verdict
from rank_monitor.contract.wire.messages import RankException
from rank_monitor.contract.wire.rank_times import RankTimes

CYCLE, PID, SENT_NS, NOW = 3, 100, 7_000_000_000, 7.5
CONDEMNED = Verdict(CYCLE, 0, PID, "section:step", 5.0, 5.5, False, 7, {}, "no progress", "line", [], {}, True)
STALLED = replace(CONDEMNED, limit=STALL, condemned=False)
OTHER_CYCLE = replace(CONDEMNED, cycle=CYCLE - 1)


@pytest.fixture
def found() -> Found:
    return Found(CycleStart(CYCLE, 0, PID, 1, ""))


def test_the_first_exception_is_the_cause(found: Found) -> None:
    first, later = (RankException(kind, "text", "", at) for kind, at in (("ValueError", 1.0), ("RuntimeError", 2.0)))
    assert found.take(first, SENT_NS, NOW) is first
    assert found.take(later, SENT_NS, NOW + 1.0) is later
    assert (found.exception, found.exception_at) == (first, NOW)


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
def test_a_verdict_explains_the_end_of_its_cycle(found: Found, verdicts: list[Verdict], kept: Verdict | None) -> None:
    for verdict in verdicts:
        expected = None if verdict.cycle != CYCLE else verdict
        assert found.take(verdict, SENT_NS, NOW) is expected
    assert found.verdict is kept


def test_a_reading_is_no_snapshot_of_the_end(found: Found) -> None:
    reading, snapshot = (Snapshot(token, True, True, 7, {}, 0.1) for token in (-1, 1))
    assert found.take(reading, SENT_NS, NOW) is None
    assert found.snapshot is None
    assert found.take(snapshot, SENT_NS, NOW) is None
    assert (found.snapshot, found.reading, found.reading_at) == (snapshot, reading, NOW)


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
def test_a_time_ledger_is_that_of_this_process(found: Found, message: Times, is_kept: bool) -> None:
    assert found.take(message, SENT_NS, NOW) is None
    assert (found.times is not None) is is_kept
