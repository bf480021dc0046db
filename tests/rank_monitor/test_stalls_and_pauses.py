"""A main thread that stands still is reported; a monitor or machine that stood still kills nobody."""

from __future__ import annotations

import pytest

from rank_monitor.contract.wire.codec import Received
from rank_monitor.contract.wire.messages import Heartbeat, Hello, Progress, Sections
from rank_monitor.hang_detector import DumpStacks, Kill, Note, SendVerdict
from tests.rank_monitor.timeline import RANK_PID, STARTED_S, Timeline, limited, ns, verdict_of, verdicts
from tests.restart_reports import report

T = STARTED_S


# Stalls.

STALL = limited(stall_warning=600.0, rank_heartbeat_timeout=5000.0)


@pytest.mark.parametrize("attached", [True, False])
def test_a_main_thread_that_stands_still_is_reported_once_and_lives(attached: bool) -> None:
    line = Timeline(STALL)
    line.say(Hello(RANK_PID))
    if attached:
        line.attach()
        line.say(Heartbeat())
    for second in range(0, 900, 10):
        done = line.say(Heartbeat(), T + second) + line.say(Progress(ns(T + 5)))
        if second == 610:
            assert [type(action) for action in done] == [DumpStacks, SendVerdict]
            (verdict,) = verdicts(done)
            assert (verdict.limit, verdict.condemned, verdict.waited_s) == ("stall", False, 600.0)
        else:
            assert verdicts(done) == []
    line.say(Progress(ns(T + 900)), T + 900)
    assert [verdict.limit for verdict in verdicts(line.until(T + 1500))] == ["stall"]


@pytest.mark.parametrize(
    ("usual_gap_s", "at"), [(None, 600.0), (2.0, 600.0), (30.0, 600.0), (31.0, 620.0), (100.0, 2000.0)]
)
def test_it_is_reported_when_it_takes_twenty_times_as_long_as_usual(usual_gap_s: float | None, at: float) -> None:
    line = Timeline(STALL)
    line.usual_gap_s = usual_gap_s
    line.say(Hello(RANK_PID))
    line.say(Progress(ns(T)))
    assert verdicts(line.until(T + at - 0.01)) == []
    done = line.until(T + at)
    assert [type(action) for action in done] == [SendVerdict], "the stacks of this moment were asked for before"
    assert [(verdict.limit, verdict.limit_s, verdict.waited_s) for verdict in verdicts(done)] == [("stall", at, at)]
    line.say(Progress(ns(T + at)), T + at)
    line.usual_gap_s = None
    assert verdicts(line.until(T + at + 599.9)) == []
    assert verdicts(line.until(T + at + 600)) != [], "what is usual is asked again for the next one"


def test_progress_within_the_lead_takes_the_warning_back() -> None:
    line = Timeline(STALL)
    line.say(Hello(RANK_PID))
    line.say(Progress(ns(T)))
    assert line.until(T + 599.95) == [DumpStacks()]
    line.say(Progress(ns(T + 599.96)), T + 599.96)
    assert line.until(T + 1199.8) == []
    assert [type(action) for action in line.until(T + 1199.96)] == [DumpStacks, SendVerdict]


def test_progress_is_no_sign_of_life() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0))
    line.attach()
    line.say(Heartbeat())
    for second in range(1, 10):
        line.say(Progress(ns(T + second)), T + second)
    assert verdict_of(line, T + 10) == ("subsequent", 10.0)


def test_no_stall_where_progress_cannot_be_seen() -> None:
    line = Timeline(STALL)
    line.say(Hello(RANK_PID))
    assert line.until(T + 1000) == [], "no stamp came yet"
    line.say(Progress(ns(T + 1000)))
    line.lose(T + 1001)
    assert line.until(T + 3000) == [], "not connected"


# A machine that stood still.


def test_a_pause_moves_every_deadline() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0, rank_section_timeouts={"step": 30.0}))
    line.attach()
    line.open("step", at=T + 1)
    line.until(T + 5)
    (note,) = line.sleep(T + 105)
    assert isinstance(note, Note)
    assert verdict_of(line, T + 111) == ("subsequent", 110.0)


def test_a_pause_that_ends_after_the_deadline_kills_nobody() -> None:
    """Rank and monitor were stopped together: the rank gets what it had left when it was stopped."""
    line = Timeline(limited(rank_heartbeat_timeout=10.0))
    line.attach()
    line.say(Heartbeat(), T + 9)
    line.until(T + 18.5)
    assert verdicts(line.sleep(T + 30)) == []
    line.say(Heartbeat(), T + 30.4)
    assert line.until(T + 40.2) == []


def test_a_pause_shows_even_when_the_deadline_is_far() -> None:
    line = Timeline(limited(rank_section_timeouts={"step": 100.0}))
    line.attach()
    line.open("step", at=T + 10)
    line.sleep(T + 60)
    line.say(Sections((("step", ns(T + 10)), ("inner", ns(T + 61)))), T + 61)
    assert verdicts(line.until(T + 110 + 49)) == [], "told again with the old moment, still moved"
    assert verdicts(line.until(T + 110 + 50.5)) != []


def test_a_section_opened_after_the_pause_is_not_moved() -> None:
    line = Timeline(limited(rank_section_timeouts={"step": 100.0}))
    line.attach()
    line.open("step", at=T + 10)
    line.sleep(T + 60)
    line.open(at=T + 61)
    line.open("step", at=T + 62)
    assert verdict_of(line, T + 162) == ("section:step", 100.0)


def test_a_pause_moves_the_kill() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0))
    line.attach()
    line.say(Heartbeat(), T + 2)
    line.until(T + 12)
    assert [type(action) for action in line.sleep(T + 60)] == [Note]
    assert line.until(T + 64.9) == []
    assert line.until(T + 65.1) == [Kill()]


def test_a_pause_moves_the_patience_with_an_interrupted_rank() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0))
    line.attach()
    line.say(report("running", is_timed=False), T + 1)
    line.say(Heartbeat(), T + 2)
    line.until(T + 12)
    line.sleep(T + 200)
    assert verdicts(line.until(T + 229.4)) == []
    assert verdicts(line.until(T + 230.1)) != []


def test_a_pause_moves_the_stall() -> None:
    line = Timeline(STALL)
    line.say(Hello(RANK_PID))
    line.say(Progress(ns(T)))
    line.sleep(T + 10_000)
    assert verdicts(line.until(T + 10_599)) == []
    assert verdicts(line.until(T + 10_600.5)) != []


def test_a_deadline_that_a_message_brings_after_the_pause_is_moved_too() -> None:
    """Nothing was armed when both were stopped; the section was opened, and told, just before."""
    line = Timeline(limited(rank_section_timeouts={"step": 10.0}))
    line.attach()
    line.until(T + 5)
    line.now = T + 60
    (note,) = line.detector.on_message(Received(Sections((("step", ns(T + 5.1)),)), 0, ns(T + 5.1)), ns(T + 60))
    assert isinstance(note, Note)
    assert verdicts(line.until(T + 69.9)) == []
    assert verdicts(line.until(T + 70.1)) != []


def test_a_little_late_is_no_pause() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0))
    line.attach()
    line.say(Heartbeat())
    line.until(T + 9.5)
    assert verdicts(line.sleep(T + 10.8)) != []


def test_the_slack_is_a_setting() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0, oversleep_slack=5.0))
    line.attach()
    line.say(Heartbeat())
    line.until(T + 9.5)
    assert verdicts(line.sleep(T + 14.0)) != []
    line = Timeline(limited(rank_heartbeat_timeout=10.0, oversleep_slack=0.0))
    line.attach()
    line.say(Heartbeat())
    assert verdicts(line.sleep(T + 9.0)) == []


def test_messages_that_waited_through_a_pause_are_heard_first() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0))
    line.attach()
    line.say(Heartbeat(), T + 1)
    line.until(T + 2)
    line.now = T + 50
    (note,) = line.detector.on_message(Received(Heartbeat(), 0, ns(T + 49.9)), ns(T + 50))
    assert isinstance(note, Note)
    assert verdict_of(line, T + 60) in [("subsequent", 10.0), ("subsequent", 10.1)]
