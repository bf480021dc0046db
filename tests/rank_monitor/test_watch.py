"""Every limit of the table, when it is judged and from which moment; warm-up; whose clock counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.launcher_messages import CycleStart
from rank_monitor.contract.wire.messages import (
    Attach,
    Detach,
    Heartbeat,
    Hello,
    IterationReached,
    LimitsSet,
    Message,
    Progress,
    Sections,
)
from rank_monitor.hang_detector import DetectorState
from tests.rank_monitor.timeline import RANK_PID, STARTED_S, Timeline, limited, ns, verdict_of, verdicts

T = STARTED_S


# The limits.


def test_initial() -> None:
    line = Timeline(limited(initial_rank_heartbeat_timeout=60.0, rank_heartbeat_timeout=10.0))
    line.attach(T + 5)
    assert verdict_of(line, T + 65) == ("initial", 60.0)


@pytest.mark.parametrize("life", [Heartbeat(), Sections((("any", 0),)), Sections(())], ids=repr)
def test_subsequent(life: Message) -> None:
    """A section message is a sign of life too."""
    line = Timeline(limited(initial_rank_heartbeat_timeout=60.0, rank_heartbeat_timeout=10.0))
    line.attach(T + 5)
    line.say(life, T + 64)
    assert verdict_of(line, T + 74) == ("subsequent", 10.0)


def test_a_client_that_only_uses_sections_under_heartbeat_limits_is_healthy() -> None:
    line = Timeline(limited(initial_rank_heartbeat_timeout=20.0, rank_heartbeat_timeout=10.0))
    line.attach()
    for step in range(50):
        assert verdicts(line.open("step", at=T + 9 * step)) == []
        assert verdicts(line.open(at=T + 9 * step + 4)) == []


def test_an_iteration_is_a_sign_of_life_but_not_the_first() -> None:
    line = Timeline(limited(initial_rank_heartbeat_timeout=60.0, rank_heartbeat_timeout=10.0))
    line.attach()
    line.say(IterationReached(0), T + 50)
    assert verdict_of(line, T + 110) == ("initial", 60.0)


@pytest.mark.parametrize("opened", [("step", "setup"), ("setup", "step")])
def test_every_overdue_section_counts_whatever_the_order(opened: tuple[str, str]) -> None:
    """An overdue outer section under a younger inner one, and the reverse."""
    line = Timeline(limited(rank_section_timeouts={"step": 20.0, "setup": 100.0}))
    line.attach()
    line.open(opened[0], at=T + 1)
    line.open(*opened, at=T + 2)
    since = T + 1 + opened.index("step")
    assert verdict_of(line, since + 20) == ("section:step", 20.0)
    assert line.detector.state is DetectorState.CONDEMNED


def test_a_section_opened_again_counts_anew() -> None:
    line = Timeline(limited(rank_section_timeouts={"step": 20.0}))
    line.attach()
    line.open("step", at=T + 1)
    line.open(at=T + 19)
    line.open("step", at=T + 20)
    assert verdict_of(line, T + 40) == ("section:step", 20.0)


def test_a_section_without_a_limit_is_recorded_and_not_judged() -> None:
    line = Timeline(limited(rank_section_timeouts={"step": 20.0, "free": None}))
    line.attach()
    line.open("free", "other", at=T + 1)
    assert line.until(T + 10_000) == []
    assert set(line.detector.watch.sections) == {"free", "other"}


def test_sections_opened_before_the_rank_asked_to_be_watched() -> None:
    line = Timeline(limited(rank_section_timeouts={"setup": 20.0}))
    line.open("setup", at=T + 1)
    assert verdicts(line.until(T + 15)) == []
    line.attach()
    assert verdict_of(line, T + 21) == ("section:setup", 20.0)


def test_out_of_section_counts_from_the_last_close() -> None:
    line = Timeline(limited(rank_section_timeouts={"step": 20.0}, rank_out_of_section_timeout=7.0))
    line.attach()
    line.open("step", at=T + 5)
    line.open("step", "inner", at=T + 6)
    line.open("step", at=T + 7)
    line.open(at=T + 8)
    line.say(Heartbeat(), T + 9)
    assert verdict_of(line, T + 15) == ("out_of_section", 7.0)


def test_out_of_section_counts_from_the_beginning_of_the_watch() -> None:
    line = Timeline(limited(rank_section_timeouts={"step": 20.0}, rank_out_of_section_timeout=7.0))
    line.attach(T + 3)
    assert verdict_of(line, T + 10) == ("out_of_section", 7.0)


@pytest.mark.parametrize("sections", [{}, {"step": None}], ids=repr)
def test_out_of_section_is_judged_only_beside_a_section_limit(sections: dict[str, float | None]) -> None:
    line = Timeline(limited(rank_section_timeouts=sections, rank_out_of_section_timeout=7.0))
    line.attach()
    assert line.until(T + 10_000) == []


def test_connect_counts_from_the_start_of_the_rank() -> None:
    line = Timeline(limited(connect_timeout=30.0))
    line.say(Hello(RANK_PID), T + 29)
    assert verdict_of(line, T + 30) == ("connect", 30.0)


def test_limits_are_not_judged_before_the_rank_asks_to_be_watched() -> None:
    settings = limited(initial_rank_heartbeat_timeout=1.0, rank_heartbeat_timeout=1.0, rank_section_timeouts={"s": 1.0})
    line = Timeline(settings)
    line.say(Hello(RANK_PID))
    line.open("s")
    assert line.until(T + 10_000) == []


def test_after_the_watch_only_the_teardown_is_judged() -> None:
    settings = limited(rank_heartbeat_timeout=10.0, rank_section_timeouts={"s": 10.0}, stall_warning=20.0)
    line = Timeline(settings)
    line.attach()
    line.open("s")
    line.say(Progress(ns(T + 1)), T + 1)
    line.say(Detach(), T + 2)
    assert line.until(T + 10_000) == []
    line = Timeline(replace(settings, teardown_timeout=50.0))
    line.attach()
    line.say(Detach(), T + 2)
    assert verdict_of(line, T + 52) == ("teardown", 50.0)


def test_a_watch_begun_again_forgets_what_was_open() -> None:
    line = Timeline(limited(rank_section_timeouts={"s": 10.0}))
    line.attach()
    line.open("s")
    line.say(Detach(), T + 2)
    line.say(Attach(), T + 3)
    assert line.until(T + 10_000) == []


def test_limits_set_by_the_training_replace_the_configured_ones() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0, rank_section_timeouts={"step": 5.0}))
    line.attach()
    line.open("step", at=T + 1)
    line.say(LimitsSet(None, 30.0, {"step": 40.0}, None, learned=["section:step"]), T + 2)
    line.say(Heartbeat(), T + 20)
    assert verdict_of(line, T + 50) == ("subsequent", 30.0)
    line.say(CycleStart(2, 3, 701, ns(T + 60), ""), T + 60)
    line.attach()
    line.open("step", at=T + 61)
    assert verdict_of(line, T + 66) == ("section:step", 5.0)


def test_a_verdict_says_whether_its_limit_was_learned() -> None:
    for learned in (["subsequent"], []):
        line = Timeline(limited())
        line.attach()
        line.say(LimitsSet(None, 10.0, {}, None, learned=learned))
        line.say(Heartbeat())
        assert verdicts(line.until(T + 10))[0].learned is bool(learned)


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), "5", True, 10**400], ids=repr)
def test_limits_that_are_none_are_refused_and_change_nothing(bad: object) -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0))
    line.attach()
    line.say(Heartbeat())
    with pytest.raises(ProtocolError):
        line.say(LimitsSet(None, None, {"step": bad}, None))
    assert verdict_of(line, T + 10) == ("subsequent", 10.0)


# Warm-up.


def _steps(line: Timeline, count: int, each: float) -> None:
    for _ in range(count):
        line.open("step", at=line.now + 1)
        line.open(at=line.now + each)


def test_a_learned_step_limit_is_not_applied_to_the_first_steps() -> None:
    line = Timeline(limited(num_warmup_iterations=3))
    line.attach()
    line.say(LimitsSet(None, None, {"step": 10.0}, None, learned=["section:step"]))
    _steps(line, 3, each=100.0)
    line.open("step", at=line.now + 1)
    assert verdict_of(line, line.now + 10) == ("section:step", 10.0)


def test_a_configured_step_limit_is_applied_from_the_first_step() -> None:
    line = Timeline(limited(num_warmup_iterations=3, rank_section_timeouts={"step": 10.0}))
    line.attach()
    line.open("step", at=T + 1)
    assert verdict_of(line, T + 11) == ("section:step", 10.0)


@pytest.mark.parametrize("learned", [[], ["section:step"]])
def test_the_first_steps_use_the_limit_of_warmup(learned: list[str]) -> None:
    line = Timeline(limited(num_warmup_iterations=2))
    line.attach()
    line.say(LimitsSet(None, None, {"step": 10.0, "warmup": 50.0}, None, learned=learned))
    _steps(line, 1, each=49.0)
    line.open("step", at=line.now + 1)
    assert verdict_of(line, line.now + 50) == ("section:warmup", 50.0)


@pytest.mark.parametrize("by", ["attach", "hello"])
def test_the_training_says_how_many_steps_are_warm_up(by: str) -> None:
    line = Timeline(limited(num_warmup_iterations=5, rank_section_timeouts={"step": 10.0, "warmup": 50.0}))
    if by == "attach":
        line.say(Attach(1))
    else:
        line.say(Hello(RANK_PID, True, ns(T), True, num_warmup_iterations=1))
    _steps(line, 1, each=49.0)
    line.open("step", at=line.now + 1)
    assert verdict_of(line, line.now + 10) == ("section:step", 10.0)


# Whose clock.


def test_judged_by_the_time_of_the_sender() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0, rank_section_timeouts={"step": 20.0}))
    line.attach()
    line.say(Heartbeat(), at=T + 5, sent=T + 2)
    assert verdict_of(line, T + 12) == ("subsequent", 10.0)


def test_a_sender_in_the_future_or_before_the_cycle_is_taken_at_its_edge() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0, rank_section_timeouts={"step": 20.0}))
    line.attach()
    line.say(Heartbeat(), at=T + 5, sent=T + 1e9)
    assert verdict_of(line, T + 15) == ("subsequent", 10.0)
    line = Timeline(limited(rank_section_timeouts={"step": 20.0}))
    line.attach()
    line.say(Sections((("step", 0),)), T + 5)
    assert verdict_of(line, T + 20) == ("section:step", 20.0)


def test_a_message_overtaken_by_a_later_one_takes_nothing_back() -> None:
    line = Timeline(limited(rank_heartbeat_timeout=10.0))
    line.attach()
    line.say(Heartbeat(), at=T + 5)
    line.say(Heartbeat(), at=T + 6, sent=T + 1)
    assert verdict_of(line, T + 15) == ("subsequent", 10.0)
