"""When the launcher is told that a rank stands still, what a snapshot says of it, and the verdict that may follow."""

from __future__ import annotations

import pytest

from rank_monitor.contract.wire.launcher_messages import HangOverdue, LogStep, StopJudging
from rank_monitor.contract.wire.messages import (
    Attach,
    Detach,
    Heartbeat,
    Hello,
    IterationReached,
    Message,
    Progress,
    Sections,
)
from rank_monitor.hang_detector import Action, DumpStacks, Interrupt, NotifyStandstill, SendSignal
from tests.rank_monitor.timeline import RANK_PID, STARTED_S, Timeline, limited, ns, verdicts
from tests.restart_reports import report

T = STARTED_S
LIMITED = limited(hang_timeout=40.0)


def stamped(line: Timeline, at: float, stamp: float) -> list[Action]:
    """The rank says that its main thread last ran at `stamp`."""
    return line.say(Progress(ns(stamp)), at)


def standing_still(**values: object) -> Timeline:
    """A rank whose main thread ran until second 2 at most."""
    line = Timeline(limited(hang_timeout=40.0, **values))
    line.say(Hello(RANK_PID))
    stamped(line, T + 2, T)
    return line


def told(actions: list[Action]) -> int:
    return sum(isinstance(action, NotifyStandstill) for action in actions)


def test_the_launcher_is_told_once_when_a_quarter_of_the_limit_has_passed() -> None:
    line = standing_still()
    for second in range(4, 12, 2):
        assert told(stamped(line, T + second, T)) == 0
    assert told(line.until(T + 11.99)) == 0, "the rank may have run until it first sent this stamp"
    assert told(line.until(T + 12.01)) == 1
    assert told(line.until(T + 500)) == 0
    assert line.detector.watch.idle_s(ns(T + 500)) == 498.0


def test_a_rank_that_stamps_is_never_looked_at() -> None:
    line = standing_still()
    for second in range(4, 400, 2):
        assert told(stamped(line, T + second, T + second - 2)) == 0
    assert told(line.until(T + 407.99)) == 0
    assert told(line.until(T + 408.01)) == 1, "its last one was first sent at 398"


@pytest.mark.parametrize(
    ("report", "age_s"),
    [
        (Heartbeat(), 5.0),
        (Sections((("data", 0),)), 5.0),
        (IterationReached(3), 5.0),
        (LogStep(3, 1, 0, ns(T + 9)), 6.0),
    ],
    ids=["heartbeat", "section", "iteration", "printed step"],
)
def test_a_report_begins_the_wait_anew(report: Message, age_s: float) -> None:
    line = standing_still()
    assert line.detector.watch.report_age_s(ns(T + 10)) is None
    line.say(report, T + 10)
    assert told(line.until(T + 18.9)) == 0
    watch = line.detector.watch
    assert (watch.idle_s(ns(T + 15)), watch.report_age_s(ns(T + 15))) == (age_s, age_s)
    assert told(line.until(T + 20.1)) == 1


def test_the_next_standstill_is_told_again() -> None:
    line = standing_still()
    assert told(line.until(T + 30)) == 1
    stamped(line, T + 31, T + 30)
    assert told(line.until(T + 40.9)) == 0
    assert told(line.until(T + 41.1)) == 1


@pytest.mark.parametrize(
    "message",
    [Detach(), StopJudging(), report("closing", 60.0, 90.0, 5.0)],
    ids=["its watch is shut down", "the cycle is over", "it restarts in process"],
)
def test_nothing_is_told_of_a_rank_that_is_not_to_run(message: Message) -> None:
    line = standing_still()
    line.say(message, T + 3)
    assert told(line.until(T + 100)) == 0
    assert line.detector.watch.idle_s(ns(T + 100)) is None


def test_nothing_is_told_without_a_limit_or_without_stamps() -> None:
    line = Timeline(limited())
    line.say(Hello(RANK_PID))
    stamped(line, T + 2, T)
    assert told(line.until(T + 1000)) == 0
    line = Timeline(LIMITED)
    line.say(Hello(RANK_PID))
    assert told(line.until(T + 1000)) == 0
    assert line.detector.watch.idle_s(ns(T + 1000)) is None
    line = standing_still()
    line.lose(T + 3)
    assert told(line.until(T + 1000)) == 0, "not connected: it may run"


def test_a_pause_of_the_machine_does_not_count() -> None:
    line = standing_still()
    line.until(T + 5)
    assert told(line.sleep(T + 1005)) == 0
    assert told(line.until(T + 1011)) == 0
    assert told(line.until(T + 1013)) == 1
    assert line.detector.watch.idle_s(ns(T + 1013)) == pytest.approx(11.0, abs=0.6)


@pytest.mark.parametrize(("limit_s", "has_own"), [(600.0, True), (None, False)])
def test_a_section_with_a_limit_of_its_own(limit_s: float | None, has_own: bool) -> None:
    line = standing_still(rank_section_timeouts={"checkpointing": limit_s})
    line.say(Attach())
    assert not line.detector.watch.has_own_limit
    line.open("checkpointing", at=T + 3)
    assert line.detector.watch.has_own_limit == has_own
    line.open(at=T + 4)
    assert not line.detector.watch.has_own_limit


def test_a_hang_that_the_launcher_has_found_ends_the_rank_at_once() -> None:
    line = standing_still()
    line.until(T + 60)
    done = line.say(HangOverdue(40.0, 41.0, "2 ranks wait for it in a collective"), T + 60) + line.until(T + 60)
    assert [type(action) for action in done if not isinstance(action, DumpStacks)][1:] == [SendSignal]
    (verdict,) = verdicts(done)
    assert (verdict.limit, verdict.limit_s, verdict.waited_s, verdict.condemned) == ("hang", 40.0, 41.0, True)
    assert verdict.reason == (
        "2 ranks wait for it in a collective for 41.00 s; the limit is 40 s (hang_timeout), exceeded by 1.000 s"
    )
    assert verdict.line == "No progress: 2 ranks wait for it in a collective. Waited 41.00 seconds."


def test_a_rank_in_a_wrapper_is_asked_to_restart_in_process_first() -> None:
    line = standing_still()
    line.say(report("running", 600.0, 900.0, 5.0), T + 3)
    done = line.say(HangOverdue(40.0, 41.0, "it waits"), T + 60) + line.until(T + 60)
    (asked,) = [action for action in done if isinstance(action, Interrupt)]
    assert (asked.verdict.limit, asked.verdict.condemned) == ("hang", False)
    line.say(report("closing", 600.0, 900.0, 5.0), T + 61)
    line.say(report("running", 600.0, 900.0, 5.0), T + 62)
    stamped(line, T + 63, T + 62)
    assert verdicts(line.until(T + 65)) == [], "what was found was about the call before"
