"""A rank with an in-process wrapper: when it is asked to restart, when killed, and what is judged in each phase."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.restart_phase import JUDGED, Judged, RestartPhase
from rank_monitor.contract.wire.launcher_messages import StopJudging
from rank_monitor.contract.wire.messages import Attach, Detach, Heartbeat, Hello, Ping, Progress, RestartReport
from rank_monitor.hang_detector import Action, DetectorState, Interrupt, Kill, SendSignal, SendVerdict
from tests.rank_monitor.timeline import NO_LIMITS, RANK_PID, STARTED_S, Timeline, limited, ns, verdicts
from tests.restart_reports import report

T = STARTED_S
RUNNING = report("running", grace_s=4.0)
UNGUARDED = replace(RUNNING, is_timed=False)
FINALIZING, RESTARTING, OVER = (
    replace(RUNNING, phase=phase) for phase in (RestartPhase.FINALIZING, RestartPhase.CLOSING, RestartPhase.DONE)
)


def stamp(line: Timeline, at: float) -> None:
    line.say(Progress(ns(at)), at)


def asked(actions: list[Action]) -> list[tuple[str, float]]:
    """Limit and waited seconds of what the wrapper was asked to restart for; no rank was condemned."""
    assert verdicts(actions) == []
    found = [action.verdict for action in actions if isinstance(action, Interrupt)]
    assert not any(verdict.condemned for verdict in found)
    return [(verdict.limit, round(verdict.waited_s, 6)) for verdict in found]


def asked_at(line: Timeline, at: float) -> tuple[str, float]:
    assert asked(line.until(at - 0.001)) == []
    (found,) = asked(line.until(at))
    return found


def killed_at(line: Timeline, at: float) -> str:
    """The limit of the verdict that condemns exactly then."""
    assert verdicts(line.until(at - 0.001)) == []
    verdict, number = line.until(at)
    assert isinstance(verdict, SendVerdict)
    assert verdict.verdict.condemned
    assert number == SendSignal(signal.SIGTERM)
    return verdict.verdict.limit


def running(settings: object = NO_LIMITS, since: float = T + 1) -> Timeline:
    """A rank whose wrapper runs the function since that second, with its first stamp then."""
    line = Timeline(settings)  # type: ignore[arg-type]
    line.say(Hello(RANK_PID), T)
    line.say(RESTARTING, T)
    line.say(Progress(ns(T)), T)
    line.say(RUNNING, since)
    stamp(line, since)
    return line


# The ladder.


def test_no_progress_interrupts_then_kills() -> None:
    line = running()
    stamp(line, T + 50)
    assert asked_at(line, T + 110) == ("soft_timeout", 60.0)
    assert line.detector.state is DetectorState.INTERRUPTED
    assert killed_at(line, T + 140) == "hard_timeout"
    assert line.until(T + 143.99) == []
    assert line.until(T + 144) == [SendSignal(signal.SIGTERM), Kill()]
    assert line.detector.next_wake() is None


def test_what_is_called_after_the_interruption_has_the_hard_timeout_whatever_the_main_thread_does() -> None:
    """There is nothing to interrupt: the rank is not asked."""
    line = running()
    line.say(FINALIZING, T + 10)
    stamp(line, T + 99)
    assert killed_at(line, T + 100) == "hard_timeout"
    assert line.until(T + 104) == [SendSignal(signal.SIGTERM), Kill()]


def test_what_is_called_after_the_interruption_ends_what_was_asked() -> None:
    line = running()
    assert asked_at(line, T + 61) == ("soft_timeout", 60.0)
    line.say(FINALIZING, T + 70)
    line.say(RESTARTING, T + 80)
    assert line.until(T + 500) == []
    assert line.detector.state is not DetectorState.INTERRUPTED


def test_what_is_said_of_both() -> None:
    line = running()
    asked_for = next(action for action in line.until(T + 61) if isinstance(action, Interrupt)).verdict
    assert asked_for.line == "Soft timeout: no progress of the main thread. Waited 60.00 seconds."
    (verdict,) = verdicts(line.until(T + 91))
    assert verdict.line == "Hard timeout: no progress of the main thread. Waited 90.00 seconds."
    assert verdict.reason == (
        "no progress of the main thread for 90.00 s; the limit is 90 s (hard_timeout), exceeded by 0.000 s"
    )


def test_stamps_keep_a_rank_going_and_no_heartbeat_does() -> None:
    line = running()
    for second in range(2, 400, 50):
        stamp(line, T + second)
        assert line.detector.state is DetectorState.WAITING
    line.say(Heartbeat(), T + 400)
    assert asked_at(line, T + 412) == ("soft_timeout", 60.0)


def test_the_restart_that_was_asked_for_ends_the_alarm() -> None:
    line = running()
    line.until(T + 61)
    line.say(RESTARTING, T + 70)
    assert line.detector.state is DetectorState.WAITING
    assert line.until(T + 10_000) == []
    line.say(RUNNING, T + 10_000)
    assert asked_at(line, T + 10_060) == ("soft_timeout", 60.0), "from its beginning, however old the last stamp is"


def test_a_main_thread_that_goes_on_by_itself_ends_the_alarm() -> None:
    line = running()
    line.until(T + 61)
    stamp(line, T + 80)
    assert line.detector.state is DetectorState.WAITING
    assert asked_at(line, T + 140) == ("soft_timeout", 60.0)


# Pings.


def test_pings_are_expected_from_the_first_on() -> None:
    line = running()
    for second in range(2, 500, 10):
        stamp(line, T + second)
    line.say(Ping(), T + 500)
    for second in (510, 540):
        stamp(line, T + second)
    assert asked_at(line, T + 560) == ("soft_timeout", 60.0)
    for second in (570, 589):
        stamp(line, T + second)
    assert line.detector.state is DetectorState.INTERRUPTED, "a livelock goes on"
    assert killed_at(line, T + 590) == "hard_timeout"


def test_an_iteration_without_pings_owes_none() -> None:
    line = running()
    line.say(Ping(), T + 10)
    line.say(RESTARTING, T + 20)
    line.say(RUNNING, T + 30)
    line.say(Ping(), T + 30, sent=T + 20)
    for second in range(31, 300, 20):
        stamp(line, T + second)
    assert line.detector.state is DetectorState.WAITING


def test_pings_alone_are_no_progress_of_the_main_thread() -> None:
    line = running()
    line.say(Ping(), T + 10)
    line.say(Ping(), T + 50)
    assert asked_at(line, T + 61) == ("soft_timeout", 60.0)


# Limits of heartbeats and sections.


def test_a_section_that_is_due_earlier_is_asked_for_first() -> None:
    line = running(limited(rank_section_timeouts={"step": 10.0}))
    line.say(Attach())
    line.open("step", at=T + 5)
    assert asked_at(line, T + 15) == ("section:step", 10.0)
    stamp(line, T + 40)
    assert killed_at(line, T + 45) == "section:step"


def test_the_soft_timeout_comes_first_when_it_is_due_first() -> None:
    line = running(limited(rank_heartbeat_timeout=100.0))
    line.say(Attach())
    line.say(Heartbeat(), T + 5)
    assert asked_at(line, T + 61) == ("soft_timeout", 60.0)
    assert killed_at(line, T + 91) == "hard_timeout"


@pytest.mark.parametrize("how", [RUNNING, UNGUARDED], ids=["timed", "not timed"])
def test_heartbeats_are_judged_while_the_function_runs(how: RestartReport) -> None:
    line = running(limited(rank_heartbeat_timeout=10.0))
    line.say(Attach())
    line.say(how)
    line.say(Heartbeat(), T + 5)
    assert asked_at(line, T + 15) == ("subsequent", 10.0)
    assert killed_at(line, T + 45) == "subsequent"


def test_what_a_former_iteration_left_open_is_closed() -> None:
    line = running(limited(rank_section_timeouts={"step": 10.0}, rank_heartbeat_timeout=10.0, teardown_timeout=10.0))
    line.say(Attach())
    line.open("step", at=T + 2)
    line.say(Heartbeat(), T + 3)
    line.say(RESTARTING, T + 4)
    assert not line.detector.watch.sections
    line.say(RUNNING, T + 30)
    for second in range(31, 90, 20):
        stamp(line, T + second)
    assert line.detector.state is DetectorState.WATCHED, "judged again from the first sign of this iteration"
    line.say(Heartbeat(), T + 91)
    assert asked_at(line, T + 101) == ("subsequent", 10.0)
    line.say(Detach(), T + 102)
    line.say(RESTARTING, T + 103)
    line.say(RUNNING, T + 104)
    assert not line.detector.watch.detached


def test_a_watch_that_must_begin_is_waited_for_anew() -> None:
    line = running(limited(connect_timeout=20.0))
    line.say(RESTARTING, T + 15)
    line.say(RUNNING, T + 100)
    assert asked_at(line, T + 120) == ("connect", 20.0)


# Phases.


def test_without_hang_protection_no_progress_is_expected_and_the_iteration_goes_on() -> None:
    line = running(limited(rank_section_timeouts={"step": 1000.0}))
    line.say(Attach())
    line.open("step", at=T + 2)
    line.say(Ping(), T + 3)
    line.say(UNGUARDED, T + 4)
    assert asked(line.until(T + 500)) == []
    line.say(RUNNING, T + 500)
    stamp(line, T + 550)
    assert list(line.detector.watch.sections) == ["step"]
    assert asked_at(line, T + 560) == ("soft_timeout", 60.0), "the ping is still expected"


@pytest.mark.parametrize("phase", RestartPhase)
def test_only_who_waits_for_others_is_not_warned_of_a_stall(phase: RestartPhase) -> None:
    line = running(limited(stall_warning=30.0))
    line.say(replace(RUNNING, phase=phase), T + 2)
    stalls = [verdict for verdict in verdicts(line.until(T + 40)) if verdict.limit == "stall"]
    assert bool(stalls) is (JUDGED[phase] is not Judged.NOTHING)


def test_a_stall_counts_from_the_end_of_the_restart() -> None:
    line = running(limited(stall_warning=30.0))
    line.say(RESTARTING, T + 2)
    line.say(RUNNING, T + 100)
    assert verdicts(line.until(T + 129)) == []
    assert [verdict.limit for verdict in verdicts(line.until(T + 130))] == ["stall"]


def test_after_the_call_the_rank_is_watched_as_before_it() -> None:
    line = running(limited(rank_heartbeat_timeout=10.0, rank_termination_signal=9))
    line.say(Attach())
    line.say(OVER, T + 2)
    assert line.until(T + 1000) == []
    line.say(Heartbeat(), T + 1000)
    *_, verdict, number = line.until(T + 1010)
    assert isinstance(verdict, SendVerdict)
    assert (verdict.verdict.limit, number) == ("subsequent", SendSignal(9))


def test_the_end_of_a_call_ends_what_was_asked_of_it() -> None:
    line = running(limited(rank_heartbeat_timeout=100.0))
    line.until(T + 61)
    line.say(OVER, T + 62)
    assert line.detector.state is DetectorState.WAITING
    assert line.until(T + 1000) == []


def test_the_end_of_a_cycle_ends_it() -> None:
    line = running()
    line.say(StopJudging(), T + 2)
    assert line.until(T + 1000) == []


@pytest.mark.parametrize(
    "silly",
    [
        replace(RUNNING, soft_timeout_s=0.0),
        replace(RUNNING, soft_timeout_s=-1.0),
        replace(RUNNING, soft_timeout_s=90.0),
        replace(RUNNING, hard_timeout_s=float("inf")),
        replace(RUNNING, hard_timeout_s=1e300),
        replace(RUNNING, soft_timeout_s=float("nan")),
        replace(RUNNING, grace_s=-0.1),
        replace(RUNNING, grace_s=float("inf")),
    ],
    ids=repr,
)
def test_silly_numbers_change_nothing(silly: RestartReport) -> None:
    line = running()
    with pytest.raises(ProtocolError, match="restart: "):
        line.say(silly, T + 2)
    assert asked_at(line, T + 61) == ("soft_timeout", 60.0)


# What breaks on the way.


def tell_again(line: Timeline, told: RestartReport, since: float, stamped: float | None = None) -> list[Action]:
    """What the client says over a new connection, now. `since`: when the phase began."""
    found = line.say(Hello(RANK_PID, restart=told))
    if stamped is not None:
        found += line.say(Progress(ns(stamped)))
    return found + line.say(told, sent=since)


def begun(told: RestartReport, at: float) -> RestartReport:
    """The report of a call of the function, or a phase, that began then."""
    return replace(told, began_ns=ns(at))


def attached_hello(last_sign: float, told: RestartReport) -> Hello:
    """The hello of a rank that is watched."""
    return Hello(RANK_PID, attached=True, last_sign_ns=ns(last_sign), got_first_sign=True, restart=told)


def test_a_broken_connection_changes_no_deadline_and_is_asked_again_when_it_is_back() -> None:
    line = running()
    line.lose(T + 30)
    assert asked_at(line, T + 61) == ("soft_timeout", 60.0)
    line.until(T + 70)
    again = tell_again(line, begun(RUNNING, T + 1), T + 1, stamped=T + 1)
    assert asked(again + line.until(T + 70.001)) == [("soft_timeout", 69.0)], "the first one may be lost"
    assert killed_at(line, T + 91) == "hard_timeout"


def test_the_hello_says_by_what_its_signs_are_judged() -> None:
    """Signs of life from the call of the function before this one do not count, and no limit runs during a restart."""
    settings = limited(rank_heartbeat_timeout=10.0, connect_timeout=1000.0)
    line = Timeline(settings, reconnect=True, attached=True)
    line.say(attached_hello(T, begun(RESTARTING, T + 50)), T + 100)
    assert line.until(T + 1000) == []
    line = Timeline(settings, reconnect=True, attached=True)
    line.say(attached_hello(T, begun(RUNNING, T + 50)), T + 100)
    assert line.until(T + 1000) == [], "no sign yet in this call"
    line = Timeline(settings, reconnect=True, attached=True)
    line.say(attached_hello(T + 95, begun(RUNNING, T + 50)), T + 100)
    assert asked_at(line, T + 105) == ("subsequent", 10.0)


def test_a_hello_with_silly_numbers_changes_nothing() -> None:
    line = running()
    with pytest.raises(ProtocolError, match="restart: "):
        line.say(Hello(RANK_PID, restart=replace(RUNNING, soft_timeout_s=0.0)), T + 2)
    assert asked_at(line, T + 61) == ("soft_timeout", 60.0)


@pytest.mark.parametrize("stamped", [T + 195.0, None])
def test_a_monitor_that_replaces_another_judges_by_what_it_is_told(stamped: float | None) -> None:
    line = Timeline(NO_LIMITS, reconnect=True)
    line.until(T + 200)
    tell_again(line, begun(RUNNING, T + 1), T + 50, stamped=stamped)
    if stamped is None:
        assert asked(line.until(T + 210)) == [], "who sends no stamps owes none"
        return
    assert asked_at(line, T + 255) == ("soft_timeout", 60.0)


def test_a_ping_before_a_stretch_without_protection_is_still_of_this_call() -> None:
    line = Timeline(NO_LIMITS, reconnect=True)
    line.until(T + 60)
    line.say(Hello(RANK_PID, restart=begun(RUNNING, T + 1)))
    line.say(Progress(ns(T + 60)))
    line.say(Ping(), sent=T + 2)
    line.say(begun(RUNNING, T + 1), sent=T + 50)
    for second in range(70, 110, 10):
        stamp(line, T + second)
    assert asked_at(line, T + 110) == ("soft_timeout", 60.0)


def test_a_monitor_that_replaces_another_has_the_agents_word_for_a_rank_that_cannot_speak() -> None:
    line = Timeline(NO_LIMITS, reconnect=True)
    line.say(RUNNING, T + 200)
    assert asked_at(line, T + 260) == ("soft_timeout", 60.0)
    assert killed_at(line, T + 290) == "hard_timeout"


def test_signs_of_this_call_survive_being_told_again() -> None:
    line = running(limited(rank_heartbeat_timeout=50.0))
    line.say(Attach(), T + 2)
    line.say(Heartbeat(), T + 3)
    line.until(T + 20)
    line.say(attached_hello(T + 3, begun(RUNNING, T + 1)))
    line.say(begun(RUNNING, T + 1), sent=T + 1)
    assert asked_at(line, T + 53) == ("subsequent", 50.0)


def test_a_restart_that_went_unheard_is_told_with_the_next_call() -> None:
    line = running()
    line.say(Ping(), T + 2)
    line.until(T + 6)
    tell_again(line, begun(RUNNING, T + 6), T + 6, stamped=T + 6)
    for second in range(7, 200, 20):
        stamp(line, T + second)
    assert line.detector.state is DetectorState.WAITING, "the ping was of the call before"


def test_a_program_that_took_the_place_of_the_training_has_no_wrapper() -> None:
    line = running()
    line.say(Hello(RANK_PID), T + 2)
    assert line.until(T + 1000) == []


def test_an_exit_ends_the_wrapper() -> None:
    line = running()
    line.detector.on_exit(ns(T + 2))
    assert line.until(T + 1000) == []


@pytest.mark.parametrize("slept_from", [T + 30, T + 62])
def test_a_pause_moves_both_timeouts(slept_from: float) -> None:
    line = running()
    line.until(slept_from)
    line.sleep(slept_from + 1000)
    found = line.until(T + 1090.4)
    assert verdicts(found) == []
    assert len([action for action in found if isinstance(action, Interrupt)]) == (1 if slept_from < T + 61 else 0)
    assert [verdict.limit for verdict in verdicts(line.until(T + 1091.1))] == ["hard_timeout"]
