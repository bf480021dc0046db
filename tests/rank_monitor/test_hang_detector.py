"""Every alarm and event, every message in every state, and the ladder in its order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rank_monitor.contract.wire.codec import Received
from rank_monitor.contract.wire.launcher_messages import CycleEnd, CycleStart
from rank_monitor.contract.wire.messages import (
    Attach,
    Detach,
    Guard,
    Heartbeat,
    Hello,
    IterationReached,
    Message,
    Sections,
)
from rank_monitor.hang_detector import (
    ALARMS,
    DetectorEvent,
    DetectorState,
    DumpStacks,
    HangDetector,
    Interrupt,
    Kill,
    SendSignal,
    SendVerdict,
)
from tests.rank_monitor.timeline import ONE_OF_EACH, STARTED_S, Timeline, limited, ns, verdicts

T = STARTED_S


# The table.

EXPECTED: dict[DetectorState | None, dict[DetectorEvent, DetectorState | None]] = {
    None: {
        DetectorEvent.LEAD: DetectorState.SUSPECT,
        DetectorEvent.ASK: DetectorState.INTERRUPTED,
        DetectorEvent.DUE: DetectorState.CONDEMNED,
        DetectorEvent.CLEAR: None,
        DetectorEvent.OVER: None,
        DetectorEvent.RESET: None,
    },
    DetectorState.SUSPECT: {
        DetectorEvent.LEAD: DetectorState.SUSPECT,
        DetectorEvent.ASK: DetectorState.INTERRUPTED,
        DetectorEvent.DUE: DetectorState.CONDEMNED,
        DetectorEvent.CLEAR: None,
        DetectorEvent.OVER: DetectorState.SUSPECT,
        DetectorEvent.RESET: None,
    },
    DetectorState.INTERRUPTED: {
        DetectorEvent.LEAD: DetectorState.INTERRUPTED,
        DetectorEvent.ASK: DetectorState.INTERRUPTED,
        DetectorEvent.DUE: DetectorState.CONDEMNED,
        DetectorEvent.CLEAR: None,
        DetectorEvent.OVER: DetectorState.INTERRUPTED,
        DetectorEvent.RESET: None,
    },
    DetectorState.CONDEMNED: {
        **dict.fromkeys(DetectorEvent, DetectorState.CONDEMNED),
        DetectorEvent.OVER: DetectorState.KILLED,
        DetectorEvent.RESET: None,
    },
    DetectorState.KILLED: {**dict.fromkeys(DetectorEvent, DetectorState.KILLED), DetectorEvent.RESET: None},
}


@pytest.mark.parametrize("alarm", list(EXPECTED))
@pytest.mark.parametrize("event", list(DetectorEvent))
def test_every_event_in_every_alarm(alarm: DetectorState | None, event: DetectorEvent) -> None:
    assert ALARMS.get((alarm, event), alarm) == EXPECTED[alarm][event]


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
    line.say(Guard("unguarded", 60.0, 90.0, 4.0), T + 1.5)
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


LIFE = (Heartbeat, Sections, IterationReached)
ALARMED = (DetectorState.SUSPECT, DetectorState.INTERRUPTED)
LAST = (DetectorState.CONDEMNED, DetectorState.KILLED)


def _after(state: DetectorState, message: Message) -> DetectorState:
    """Where a message leads."""
    if isinstance(message, CycleEnd):
        return DetectorState.WATCHED if state in (*ALARMED, *LAST) else state  # nothing is judged: no alarm
    if state in LAST:
        return state
    if isinstance(message, Attach) or (isinstance(message, Hello) and message.attached):
        return DetectorState.WATCHED
    if isinstance(message, Detach):
        return DetectorState.DETACHED
    if isinstance(message, Guard):  # the training's function is called anew, or (unguarded before) goes on
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
    assert line.detector.next_deadline() is not None, "connect_timeout"
    assert not line.detector.watch.sections


@pytest.mark.parametrize("state", list(DetectorState))
def test_the_exit_of_the_rank_in_every_state(state: DetectorState) -> None:
    line = IN_STATE[state]()
    line.detector.on_exit(ns(line.now))
    assert line.detector.next_deadline() is None
    assert line.until(line.now + 10_000) == []


@pytest.mark.parametrize("state", list(DetectorState))
def test_the_end_of_the_cycle_in_every_state(state: DetectorState) -> None:
    line = IN_STATE[state]()
    line.say(CycleEnd())
    assert line.detector.next_deadline() is None
    assert line.until(line.now + 10_000) == []


@pytest.mark.parametrize("state", [state for state in DetectorState if state is not DetectorState.KILLED])
def test_a_lost_connection_never_switches_the_watch_off(state: DetectorState) -> None:
    line = IN_STATE[state]()
    line.lose(line.now)
    assert line.detector.next_deadline() is not None


def test_before_the_first_cycle_nothing_is_judged() -> None:
    detector = HangDetector(SETTINGS)
    for message in ONE_OF_EACH:
        assert detector.on_message(Received(message, 0, 5), 10) == []
    assert detector.next_deadline() is None
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
    assert line.detector.next_deadline() is None


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
