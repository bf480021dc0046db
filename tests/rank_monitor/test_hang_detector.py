"""Every alarm and event, every message in every state, and the ladder in its order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rank_monitor.contract.wire.codec import Received
from rank_monitor.contract.wire.launcher_messages import CycleStart, StopJudging
from rank_monitor.contract.wire.messages import (
    Attach,
    Detach,
    Heartbeat,
    Hello,
    IterationReached,
    Message,
    RestartReport,
    Sections,
)
from rank_monitor.hang_detector import (
    DetectorState,
    DumpStacks,
    HangDetector,
    Interrupt,
    Kill,
    SendSignal,
    SendVerdict,
)
from tests.rank_monitor.timeline import ONE_OF_EACH, STARTED_S, Timeline, limited, ns, verdicts
from tests.restart_reports import report

T = STARTED_S


SETTINGS = limited(rank_heartbeat_timeout=10.0, connect_timeout=30.0, teardown_timeout=60.0)


def _waiting() -> Timeline:
    return Timeline(SETTINGS)


def _watched() -> Timeline:
    line = _waiting()
    line.attach(T + 1)
    line.say(Heartbeat(), T + 2)
    return line


def _detached() -> Timeline:
    line = _watched()
    line.say(Detach(), T + 3)
    return line


def _suspect() -> Timeline:
    line = _watched()
    line.until(T + 11.95)
    return line


def _guarded() -> Timeline:
    line = _waiting()
    line.attach(T + 1)
    line.say(report("running", grace_s=4.0, is_timed=False), T + 1.5)
    line.say(Heartbeat(), T + 2)
    return line


def _interrupted() -> Timeline:
    line = _guarded()
    line.until(T + 12)
    return line


def _condemned() -> Timeline:
    line = _watched()
    line.until(T + 12)
    return line


def _killed() -> Timeline:
    line = _condemned()
    line.until(T + 17)
    return line


IN_STATE: dict[DetectorState, Callable[[], Timeline]] = {
    DetectorState.WAITING: _waiting,
    DetectorState.WATCHED: _watched,
    DetectorState.DETACHED: _detached,
    DetectorState.SUSPECT: _suspect,
    DetectorState.INTERRUPTED: _interrupted,
    DetectorState.CONDEMNED: _condemned,
    DetectorState.KILLED: _killed,
}


def state_of(line: Timeline) -> DetectorState:
    return line.detector.state


LATE = T + 12.3
"""Past the deadline, by less than what counts as a pause of the monitor."""


@pytest.mark.parametrize(
    ("before", "happens", "after"),
    [
        (_watched, lambda line: line.until(T + 11.95), DetectorState.SUSPECT),
        (_watched, lambda line: (line.until(T + 11.8), line.sleep(LATE)), DetectorState.CONDEMNED),
        (_guarded, lambda line: line.until(T + 11.95), DetectorState.SUSPECT),
        (_guarded, lambda line: (line.until(T + 11.8), line.sleep(LATE)), DetectorState.INTERRUPTED),
        (_suspect, lambda line: line.say(Heartbeat(), T + 11.99), DetectorState.WATCHED),
        (_suspect, lambda line: line.lose(T + 11.99), DetectorState.SUSPECT),
        (_suspect, lambda line: line.until(T + 12), DetectorState.CONDEMNED),
        (_suspect, lambda line: line.say(report("running", 60.0, 90.0, 5.0), T + 11.99), DetectorState.WATCHED),
        (_interrupted, lambda line: line.say(Heartbeat(), T + 20), DetectorState.WATCHED),
        (_interrupted, lambda line: line.until(T + 41.9), DetectorState.INTERRUPTED),
        (_interrupted, lambda line: line.until(T + 42), DetectorState.CONDEMNED),
        (_condemned, lambda line: line.say(Heartbeat(), T + 12.1), DetectorState.CONDEMNED),
        (_condemned, lambda line: line.lose(T + 12.1), DetectorState.CONDEMNED),
        (_condemned, lambda line: line.until(T + 16.9), DetectorState.CONDEMNED),
        (_condemned, lambda line: line.until(T + 17), DetectorState.KILLED),
        (_killed, lambda line: line.say(Heartbeat(), T + 18), DetectorState.KILLED),
        (_killed, lambda line: line.until(T + 10_000), DetectorState.KILLED),
    ],
    ids=[
        "the deadline comes close",
        "the monitor is late, and it has passed",
        "the deadline comes close within a wrapper",
        "the monitor is late, and it has passed within a wrapper",
        "a suspect shows a sign of life",
        "a suspect's connection breaks",
        "a suspect's deadline passes",
        "a suspect's function is called anew",
        "an interrupted rank shows a sign of life",
        "an interrupted rank does not restart yet",
        "an interrupted rank does not restart in time",
        "a condemned rank shows a sign of life",
        "a condemned rank's connection breaks",
        "a condemned rank has some grace left",
        "a condemned rank has no grace left",
        "a killed rank shows a sign of life",
        "a killed rank stays",
    ],
)
def test_an_alarm_and_what_happens_next(
    before: Callable[[], Timeline], happens: Callable[[Timeline], object], after: DetectorState
) -> None:
    line = before()
    happens(line)
    assert state_of(line) is after


LIFE = (Heartbeat, Sections, IterationReached)
ALARMED = (DetectorState.SUSPECT, DetectorState.INTERRUPTED)
LAST = (DetectorState.CONDEMNED, DetectorState.KILLED)


def _after(state: DetectorState, message: Message) -> DetectorState:
    """Where a message leads."""
    if isinstance(message, StopJudging):
        return DetectorState.WATCHED if state in (*ALARMED, *LAST) else state  # nothing is judged: no alarm
    if state in LAST:
        return state
    if isinstance(message, Attach) or (isinstance(message, Hello) and message.attached):
        return DetectorState.WATCHED
    if isinstance(message, Detach):
        return DetectorState.DETACHED
    if isinstance(message, RestartReport):  # the training's function is called anew, or (not timed before) goes on
        if state is DetectorState.INTERRUPTED and message.phase == "running":
            return state
        return (
            DetectorState.WAITING if state in (DetectorState.WAITING, DetectorState.DETACHED) else DetectorState.WATCHED
        )
    if isinstance(message, Hello) and state is not DetectorState.DETACHED:
        return DetectorState.WAITING  # the same process says that it is not watched
    return DetectorState.WATCHED if state in ALARMED and isinstance(message, LIFE) else state


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=repr)
@pytest.mark.parametrize("state", list(DetectorState))
def test_every_message_in_every_state(state: DetectorState, message: Message) -> None:
    line = IN_STATE[state]()
    assert line.detector.state is state
    line.say(replace(message, last_sign_ns=ns(line.now)) if isinstance(message, Hello) else message)
    assert line.detector.state is _after(state, message)


@pytest.mark.parametrize("state", list(DetectorState))
def test_a_new_cycle_in_every_state(state: DetectorState) -> None:
    line = IN_STATE[state]()
    line.say(CycleStart(2, 3, 701, ns(line.now), ""))
    assert line.detector.state is DetectorState.WAITING
    assert line.detector.next_wake() is not None, "connect_timeout"
    assert not line.detector.watch.sections


@pytest.mark.parametrize("state", list(DetectorState))
def test_the_exit_of_the_rank_in_every_state(state: DetectorState) -> None:
    line = IN_STATE[state]()
    line.detector.on_exit(ns(line.now))
    assert line.detector.next_wake() is None
    assert line.until(line.now + 10_000) == []


@pytest.mark.parametrize("state", list(DetectorState))
def test_the_end_of_the_cycle_in_every_state(state: DetectorState) -> None:
    line = IN_STATE[state]()
    line.say(StopJudging())
    assert line.detector.next_wake() is None
    assert line.until(line.now + 10_000) == []


@pytest.mark.parametrize("state", [state for state in DetectorState if state is not DetectorState.KILLED])
def test_a_lost_connection_never_switches_the_watch_off(state: DetectorState) -> None:
    line = IN_STATE[state]()
    line.lose(line.now)
    assert line.detector.next_wake() is not None


def test_before_the_first_cycle_nothing_is_judged() -> None:
    detector = HangDetector(SETTINGS)
    for message in ONE_OF_EACH:
        assert detector.on_message(Received(message, 0, 5), 10) == []
    assert detector.next_wake() is None
    assert detector.on_tick(ns(1e6)) == []


# The ladder.


def test_the_ladder_in_order() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0, rank_termination_signal=15, termination_grace_time=4.0))
    line.attach(T + 1)
    line.say(Heartbeat(), T + 2)
    assert line.until(T + 11.89) == []
    assert line.until(T + 11.9) == [DumpStacks()]
    assert state_of(line) is DetectorState.SUSPECT
    first, second = line.until(T + 12)
    assert isinstance(first, SendVerdict), "the verdict comes before the signal"
    assert second == SendSignal(15)
    assert state_of(line) is DetectorState.CONDEMNED
    assert line.until(T + 15.99) == []
    assert line.until(T + 16) == [Kill()]
    assert state_of(line) is DetectorState.KILLED
    assert line.detector.next_wake() is None


def test_a_late_sign_of_life_clears_the_suspicion_and_does_not_bring_back_the_condemned() -> None:
    line = _suspect()
    line.say(Heartbeat(), T + 11.99)
    assert state_of(line) is DetectorState.WATCHED
    assert line.until(T + 21.88) == []
    line.until(T + 22)
    line.say(Heartbeat(), T + 22.1)
    assert state_of(line) is DetectorState.CONDEMNED


def test_a_sign_of_life_that_came_after_the_deadline_but_before_judgement_counts() -> None:
    line = _suspect()
    line.now = T + 12.5
    line.detector.on_message(Received(Heartbeat(), 0, ns(T + 12.4)), ns(T + 12.5))
    assert line.until(T + 22.2) == []


def test_stacks_are_asked_for_at_once_when_the_lead_was_missed_and_not_at_all_when_not_wanted() -> None:
    line = _watched()
    line.until(T + 11.8)
    assert [type(action) for action in line.sleep(T + 12.3)] == [DumpStacks, SendVerdict, SendSignal]
    line = Timeline(limited(rank_heartbeat_timeout=10.0, dump_stacks=False))
    line.attach()
    line.say(Heartbeat())
    assert [type(action) for action in line.until(T + 11)] == [SendVerdict, SendSignal]


def test_the_lead_is_a_tenth_of_a_short_limit() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=0.2))
    line.attach()
    line.say(Heartbeat())
    assert line.until(T + 0.179) == []
    assert line.until(T + 0.181) == [DumpStacks()]


def test_a_rank_that_can_restart_in_process_is_asked_first() -> None:
    line = _guarded()
    *_, asked = line.until(T + 12)
    assert isinstance(asked, Interrupt)
    assert not asked.verdict.condemned
    assert verdicts(line.until(T + 41.9)) == []
    (verdict,) = verdicts(line.until(T + 42))
    assert (verdict.condemned, verdict.limit) == (True, "subsequent")
    assert state_of(line) is DetectorState.CONDEMNED


def test_an_interrupted_rank_that_lives_again_is_watched_again() -> None:
    line = _interrupted()
    line.say(Heartbeat(), T + 20)
    assert state_of(line) is DetectorState.WATCHED
    assert isinstance(line.until(T + 30)[-1], Interrupt)
