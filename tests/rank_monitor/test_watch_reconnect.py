"""Connections that are lost and come back, and monitors that take the place of another."""

from __future__ import annotations

from dataclasses import replace

from rank_monitor.contract.wire.codec import Received
from rank_monitor.contract.wire.launcher_messages import CycleStart
from rank_monitor.contract.wire.messages import Heartbeat, Hello, Sections
from rank_monitor.hang_detector import DetectorState, HangDetector, Note
from tests.rank_monitor.timeline import RANK_PID, STARTED_S, Timeline, limited, ns, verdict_of

T = STARTED_S


# Lost connections and replaced monitors.


def test_a_lost_connection_leaves_every_limit_in_force() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0))
    line.attach()
    line.say(Heartbeat(), T + 1)
    line.lose(T + 5)
    limit, _ = verdict_of(line, T + 11)
    assert limit in ("subsequent", "reconnect")


def test_a_lost_connection_must_come_back_within_the_connect_timeout() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=1000.0, connect_timeout=30.0))
    line.attach()
    line.say(Heartbeat(), T + 1)
    line.lose(T + 500)
    assert verdict_of(line, T + 530) == ("reconnect", 30.0)


def test_a_lost_connection_between_sections_is_judged_by_the_largest_limit() -> None:
    line = Timeline(limited(rank_section_timeouts={"step": 20.0, "checkpointing": 60.0}))
    line.attach()
    line.open("step", at=T + 1)
    line.open(at=T + 2)
    line.lose(T + 3)
    assert verdict_of(line, T + 62) == ("reconnect", 60.0)


def test_a_connection_that_came_back_is_as_before() -> None:
    line = Timeline(limited(rank_section_timeouts={"step": 20.0}, connect_timeout=5.0))
    line.attach()
    line.open("step", at=T + 1)
    line.lose(T + 3)
    line.say(Hello(RANK_PID, attached=True, last_sign_ns=ns(T + 1), got_first_sign=True), T + 4)
    assert verdict_of(line, T + 21) == ("section:step", 20.0)


def test_a_monitor_that_replaces_another_waits_for_the_rank_to_come_back() -> None:
    settings = limited(rank_heartbeat_timeout=10.0, rank_section_timeouts={"step": 60.0})
    line = Timeline(settings, reconnect=True, attached=True)
    assert verdict_of(line, T + 60) == ("reconnect", 60.0)
    line = Timeline(replace(settings, connect_timeout=7.0), reconnect=True, attached=True)
    assert verdict_of(line, T + 7) == ("reconnect", 7.0)
    line = Timeline(
        settings,
        reconnect=True,
        attached=True,
        limits={"initial": None, "subsequent": 90.0, "sections": {}, "out_of_section": None},
    )
    assert verdict_of(line, T + 90) == ("reconnect", 90.0)


def test_a_monitor_that_replaces_another_under_a_rank_that_was_not_watched_arms_nothing() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0, connect_timeout=5.0), reconnect=True, attached=False)
    assert line.until(T + 10_000) == []


def test_a_replaced_monitor_is_told_exactly_where_the_rank_is() -> None:
    settings = limited(
        initial_rank_heartbeat_timeout=90.0, rank_section_timeouts={"step": 60.0}, rank_out_of_section_timeout=30.0
    )
    line = Timeline(settings, started_ns=ns(T - 500), reconnect=True, attached=True)
    line.say(Hello(RANK_PID, attached=True, last_sign_ns=ns(T - 5), got_first_sign=False), T + 1)
    assert line.detector.next_wake() is not None
    line.say(Sections(()), T + 1, sent=T - 7)
    assert verdict_of(line, T + 23) == ("out_of_section", 30.0)
    line = Timeline(settings, started_ns=ns(T - 500), reconnect=True, attached=True)
    line.say(Hello(RANK_PID, attached=True, last_sign_ns=ns(T - 5), got_first_sign=False), T + 1)
    line.say(Sections((("step", ns(T - 20)),)), T + 1, sent=T - 5)
    assert verdict_of(line, T + 40) == ("section:step", 60.0)


def test_limits_of_a_cycle_that_are_none_are_not_used() -> None:
    detector = HangDetector(limited(rank_heartbeat_timeout=10.0))
    start = CycleStart(1, 0, RANK_PID, ns(T), "", reconnect=True, attached=True, limits={"nonsense": 1})
    (note,) = detector.on_message(Received(start, 0, ns(T)), ns(T))
    assert isinstance(note, Note)
    assert detector.watch.limits.subsequent == 10.0


def _watched() -> Timeline:
    line = Timeline(limited(rank_heartbeat_timeout=10.0))
    line.attach()
    line.say(Heartbeat(), T + 2)
    return line


def test_a_rank_that_became_another_program_is_not_judged_by_what_it_was() -> None:
    """exec: the same pid says hello and is not watched. Any other process cannot switch the watch off."""
    line = _watched()
    line.lose(line.now)
    line.say(Hello(RANK_PID), T + 3)
    assert line.detector.state is DetectorState.WAITING
    assert line.until(T + 10_000) == []
    line = _watched()
    line.lose(line.now)
    line.say(Hello(RANK_PID + 1), T + 3)
    assert verdict_of(line, T + 12) == ("subsequent", 10.0)
