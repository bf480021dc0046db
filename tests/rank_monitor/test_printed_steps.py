"""Steps that a rank prints, as the launcher reports them: the iteration, the limit from one to the next, the ledger."""

from __future__ import annotations

import pytest

from rank_monitor.contract.wire.launcher_messages import LogOverdue, LogStep
from rank_monitor.contract.wire.messages import (
    NO_ITERATION,
    Detach,
    IterationReached,
)
from rank_monitor.hang_detector import DetectorState
from tests.rank_monitor.timeline import STARTED_S, Timeline, limited, ns, verdicts
from tests.restart_reports import report

T = STARTED_S
LIMITED = limited(watch_log_timeout=10.0)


def printed(line: Timeline, iteration: int, at: float, steps: int = 0, step_s: float = 0.0) -> None:
    line.say(LogStep(iteration, steps, ns(step_s), ns(at)), at)


def test_a_silence_condemns_a_rank_that_never_connected() -> None:
    line = Timeline(LIMITED)
    printed(line, 8, T + 20)
    assert verdicts(line.until(T + 100)) == []
    found = line.say(LogOverdue(ns(T + 20)), T + 100) + line.until(T + 101)
    (verdict,) = verdicts(found)
    assert (verdict.limit, verdict.limit_s, verdict.iteration, verdict.condemned) == ("log", 10.0, 8, True)
    assert verdict.reason.startswith("printed no new step for 80.00 s; the limit is 10 s (watch_log_timeout)")
    assert line.detector.state is DetectorState.CONDEMNED


def test_a_step_that_comes_before_the_deadline_clears_it() -> None:
    line = Timeline(LIMITED)
    printed(line, 8, T + 20)
    line.say(LogOverdue(ns(T + 20)), T + 29.95)
    assert line.until(T + 29.96) != [] and line.detector.state is DetectorState.SUSPECT
    printed(line, 9, T + 29.97)
    assert line.detector.state is DetectorState.WAITING
    assert verdicts(line.until(T + 100)) == []


def test_a_silence_of_an_earlier_process_or_call_is_none() -> None:
    line = Timeline(LIMITED)
    line.say(LogOverdue(ns(T - 1)), T + 20)
    assert verdicts(line.until(T + 30)) == []
    line.attach(T + 31)
    line.say(report("running", 1e6, 2e6), T + 40)
    line.say(LogOverdue(ns(T + 35)), T + 50)
    assert verdicts(line.until(T + 60)) == []


def test_after_the_watch_was_shut_down_nothing_more_is_expected() -> None:
    line = Timeline(LIMITED)
    line.attach(T + 1)
    printed(line, 8, T + 20)
    line.say(Detach(), T + 25)
    line.say(LogOverdue(ns(T + 20)), T + 40)
    assert verdicts(line.until(T + 60)) == []


def test_what_the_training_reports_itself_wins() -> None:
    line = Timeline(LIMITED)
    line.attach(T + 1)
    printed(line, 8, T + 2)
    line.say(IterationReached(100), T + 3)
    printed(line, 9, T + 4)
    assert line.detector.watch.iteration == 100


def seconds(line: Timeline) -> dict[str, float]:
    return {place: spent / 1e9 for place, spent in line.detector.watch.ledger.times(ns(line.now)).outside.items()}


@pytest.mark.parametrize("step_s", [0.0, 1.5], ids=["by the clock", "as printed"])
def test_the_ledger_counts_steps_from_the_first_printed_one(step_s: float) -> None:
    """Before it is setup: how many steps were done by then is not known."""
    line = Timeline(LIMITED)
    for iteration, at in ((20, T + 30), (20, T + 31), (30, T + 50), (40, T + 70)):
        printed(line, iteration, at, step_s=step_s)
    found = line.detector.watch.ledger.times(ns(T + 70))
    assert (found.since_ns, found.resumed, found.iteration, found.step.count) == (ns(T), 20, 40, 20)
    assert found.step.most_ns == ns(step_s or 2.0) and found.by_iterations and found.attached
    assert seconds(line) == {"starting": 30.0, "between": 40.0}
    assert found.points == [(20, 0), (30, ns(20)), (40, ns(40))]


def test_steps_without_an_iteration_are_counted_and_say_nothing_of_the_resume() -> None:
    line = Timeline(LIMITED)
    for steps, at in ((0, T + 10), (1, T + 20), (4, T + 28)):
        printed(line, NO_ITERATION, at, steps)
    found = line.detector.watch.ledger.times(ns(T + 28))
    assert (found.resumed, found.iteration, found.step.count, found.points) == (-2, NO_ITERATION, 4, [])
    assert seconds(line) == {"starting": 20.0, "between": 8.0}


def test_what_is_read_after_the_end_belongs_to_the_process_that_ended() -> None:
    line = Timeline(LIMITED)
    printed(line, 1, T + 10)
    line.until(T + 20)
    line.detector.on_exit(ns(T + 20))
    printed(line, 2, T + 25)
    found = line.detector.watch.ledger.times(ns(T + 30))
    assert (found.iteration, found.step.count, found.now_ns) == (2, 1, ns(T + 20))
    assert seconds(line) == {"starting": 10.0, "between": 10.0}
