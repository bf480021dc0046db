"""What the policy remembers of ended cycles: errors in a row, moves, classes of faults, young deaths."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.decide.attribution import Fault, FaultClass, FaultKind
from ft_launcher.decide.policy.ended_cycle import CycleLife
from ft_launcher.decide.policy.restart_policy import Action, Question, answer
from rank_monitor.contract.restart_history import History
from rank_monitor.contract.settings.config import RestartSettings
from rank_monitor.contract.wire.messages import NO_ITERATION

CRASH = Fault(FaultKind.EXIT, 1, 1, 101, 3, "exited with code 3", "", "", agreed_exit_code=3)
ERROR = "ValueError at train.py:7"
ONCE = RestartSettings()


def ended(history: History, fault: Fault, life: CycleLife, settings: RestartSettings = ONCE) -> History:
    """The history after one more cycle, without a restart that is charged."""
    return answer(fault, Question(settings, 0, history, life), now=1.0)[1]


def raised(error: str, iteration: int) -> Fault:
    return replace(CRASH, kind=FaultKind.EXCEPTION, error=error, iteration=iteration)


@pytest.mark.parametrize(
    ("faults", "times"),
    [
        ([raised(ERROR, 4)], 1),
        ([raised(ERROR, 4)] * 3, 3),
        ([raised(ERROR, 4), raised(ERROR, 5)], 1),
        ([raised(ERROR, 4), raised("KeyError at train.py:7", 4)], 1),
        ([raised(ERROR, 4), CRASH], 0),
        ([raised(ERROR, 4), CRASH, raised(ERROR, 4)], 1),
        ([raised(ERROR, NO_ITERATION)] * 3, 0),
        ([raised("ValueError at /run_1/a.py:7", 4), raised("ValueError at /run_2/a.py:7", 4)], 2),
        ([raised("", 4)] * 3, 0),
    ],
)
def test_errors_in_a_row(faults: list[Fault], times: int) -> None:
    history = History()
    for fault in faults:
        history = ended(history, fault, CycleLife())
    assert history.same_errors == times


USER = replace(raised(ERROR, NO_ITERATION), fault_class=FaultClass.USER_ERROR, error_text="one")
EARLY = replace(USER, before_group=True)
BRIEF_LIFE, LONG_LIFE = CycleLife(599.0), CycleLife(600.0)


@pytest.mark.parametrize(
    ("cycles", "times", "early"),
    [
        ([(EARLY, CycleLife(59.0))] * 2, 2, 2),
        ([(EARLY, CycleLife(60.0))] * 2, 2, 0),
        ([(EARLY, CycleLife(60.0)), (EARLY, CycleLife(59.0))], 2, 1),
        ([(EARLY, CycleLife(59.0)), (USER, CycleLife(59.0)), (EARLY, CycleLife(59.0))], 3, 1),
        ([(USER, BRIEF_LIFE)] * 3, 3, 0),
        ([(USER, LONG_LIFE)] * 3, 0, 0),
        ([(USER, BRIEF_LIFE), (USER, LONG_LIFE), (USER, BRIEF_LIFE)], 1, 0),
        ([(EARLY, CycleLife()), (replace(EARLY, error_text="two"), CycleLife())], 1, 1),
        ([(EARLY, CycleLife()), (replace(EARLY, error="ValueError at train.py:8"), CycleLife())], 1, 1),
        ([(EARLY, CycleLife()), (CRASH, CycleLife()), (EARLY, CycleLife())], 1, 1),
        ([(EARLY, CycleLife(iteration=10 * number)) for number in range(3)], 1, 1),
        ([(EARLY, CycleLife(iteration=7)), *[(EARLY, CycleLife(iteration=7))] * 2], 3, 3),
        *[
            ([(replace(EARLY, fault_class=other), CycleLife())] * 3, 0, 0)
            for other in FaultClass
            if other is not FaultClass.USER_ERROR
        ],
        *[
            ([(replace(EARLY, error=f"{kind} at a.py:1"), CycleLife())] * 2, 2 * counts, 2 * counts)
            for kind, counts in (
                ("FileNotFoundError", 1),
                ("OSError", 0),
                ("PermissionError", 0),
                ("BlockingIOError", 0),
            )
        ],
    ],
)
def test_an_error_without_an_iteration(cycles: list[tuple[Fault, CycleLife]], times: int, early: int) -> None:
    history = History()
    for fault, life in cycles:
        history = ended(history, fault, life)
    assert (history.same_errors, history.early_errors) == (times, early)


def test_moves_in_a_row_are_not_held_against_progress() -> None:
    move = replace(CRASH, exit_code=16)
    history = History(mark=5, no_progress=2)
    for _ in range(4):
        history = ended(history, move, CycleLife(1.0, 5))
    assert (history.moves, history.no_progress) == (4, 2)
    assert ended(history, CRASH, CycleLife(1.0, 5)).moves == 0


def test_a_rank_told_to_end_is_not_held_against_progress() -> None:
    told = replace(CRASH, fault_class=FaultClass.PREEMPTION)
    history = ended(History(mark=5, no_progress=2), told, CycleLife(1.0, 5))
    assert history.no_progress == 2
    assert ended(history, CRASH, CycleLife(1.0, 5)).no_progress == 3


def test_the_class_of_the_last_fault_and_how_often_it_was_that() -> None:
    history, seen = History(), []
    for fault_class in (FaultClass.MEMORY, FaultClass.MEMORY, FaultClass.HANG, FaultClass.MEMORY):
        history = ended(history, replace(CRASH, fault_class=fault_class), CycleLife())
        seen.append((history.fault_class, history.same_class))
    assert seen == [("memory", 1), ("memory", 2), ("hang", 1), ("memory", 1)]


@pytest.mark.parametrize(
    ("backoff", "lived_s", "young"),
    [((1.0, 60.0), 119.0, 4), ((1.0, 60.0), 120.0, 0), ((0.0, 0.0), 0.0, 0)],
)
def test_a_cycle_that_lived_long_ends_the_waits(backoff: tuple[float, float], lived_s: float, young: int) -> None:
    settings = RestartSettings(backoff=backoff)
    assert ended(History(young=3), CRASH, CycleLife(lived_s), settings).young == young


def test_torchruns_meaning_without_iterations() -> None:
    """The same exception for ever, of a class that a restart may mend, and no iteration: N restarts."""
    history, restarts = History(), 0
    while True:
        question = Question(ONCE, 5, history, CycleLife(1.0))
        decision, history = answer(raised(ERROR, NO_ITERATION), question, now=1.0)
        if decision.action is Action.GIVE_UP:
            break
        restarts += 1
    assert (restarts, decision.exit_code) == (5, 3)


@given(st.lists(st.integers(NO_ITERATION, 6) | st.none(), max_size=30), st.integers(1, 3), st.integers(1, 4))
def test_a_job_without_progress_always_ends(reached: list[int | None], least: int, cycles: int) -> None:
    """The budget can be given back at most so often as there are steps of progress; between them it is spent."""
    settings = RestartSettings(min_progress_iterations=least, max_no_progress_cycles=0)
    history, given_back, restarts = History(), 0, 0
    for iteration in reached:
        before = history.mark
        question = Question(settings, cycles, history, CycleLife(100.0, iteration))
        decision, history = answer(CRASH, question, now=10.0)
        if history.mark != before:
            given_back += 1
            assert before is None or (history.mark or 0) >= before + least
        if decision.action is Action.GIVE_UP:
            break
        restarts += 1
    assert restarts <= cycles * (given_back + 1)
