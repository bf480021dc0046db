"""When a state in memory is set aside, by tables: faults of cycles in, decisions out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ft_launcher.decide.attribution import BAD_LOSS, Fault, FaultClass, FaultKind
from ft_launcher.decide.policy import bad_state, restart_policy
from ft_launcher.decide.policy.ended_cycle import CycleLife
from ft_launcher.decide.policy.restart_policy import Action, Decision, Question
from rank_monitor.contract.restart_history import History
from rank_monitor.contract.settings.config import RestartSettings

ERROR = Fault(
    *(FaultKind.EXCEPTION, 1, 1, 101, 1, "raised ValueError", "", ""),
    iteration=100,
    agreed_exit_code=1,
    error="ValueError at train.py:7",
    fault_class=FaultClass.USER_ERROR,
)
NAN = replace(ERROR, error=BAD_LOSS, fault_class=FaultClass.UNKNOWN)
MOVE = replace(ERROR, kind=FaultKind.EXIT, error="", exit_code=16, fault_class=FaultClass.HARDWARE)
KILLED = Fault(FaultKind.SIGNAL, 1, 1, 101, -9, "died of SIGKILL", "", "", agreed_exit_code=-9)
OTHER_CAUSES = {
    "killed": KILLED,
    "unknown": replace(ERROR, fault_class=FaultClass.UNKNOWN),
    "memory": replace(ERROR, fault_class=FaultClass.MEMORY),
    "infrastructure": replace(ERROR, fault_class=FaultClass.INFRASTRUCTURE),
    "hang": replace(ERROR, kind=FaultKind.HANG, fault_class=FaultClass.HANG),
    "preemption": replace(KILLED, exit_code=-15, fault_class=FaultClass.PREEMPTION),
    "device": replace(ERROR, fault_class=FaultClass.HARDWARE),
    "no exception": replace(ERROR, error="", exit_code=2),
}
SETTINGS = RestartSettings()


def cycle(loaded: int | None, step: int | None = 99, series: str = "a", saved: int = 0) -> CycleLife:
    """A cycle that went on from a step in memory (0: from the disk; None: it did not look), came to `step`, and saved
    the steps up to `saved` (0: none)."""
    name = series if loaded else ""
    return CycleLife(700.0, 100, loaded, name, step, step or 0, saved)


def decisions(
    cycles: Sequence[tuple[Fault, CycleLife]],
    settings: RestartSettings = SETTINGS,
    budget: int = 50,
    other_hardware: bool = False,
) -> list[Decision]:
    """What follows each of the cycles, with the history passed on as between nodes."""
    history, found = History(), []
    for fault, life in cycles:
        asked = Question(settings, budget, history, life, other_hardware)
        asked = Question.from_record(json.loads(json.dumps(asked.to_record(0.0))), 0.0)
        decision, history = restart_policy.answer(fault, asked, 0.0)
        found.append(decision)
    return found


def set_aside(cycles: Sequence[tuple[Fault, CycleLife]], **more: bool) -> list[int]:
    return [decision.set_aside_from for decision in decisions(cycles, **more)]  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [ERROR, NAN])
def test_the_second_failure_from_a_state_sets_it_aside(fault: Fault) -> None:
    assert set_aside([(fault, cycle(0)), (fault, cycle(95)), (fault, cycle(95))]) == [0, 0, 95]


def test_the_second_exit_16_from_a_state_sets_it_aside_and_is_charged() -> None:
    first, second = decisions([(MOVE, cycle(95)), (MOVE, cycle(95))], other_hardware=True)
    assert (first.set_aside_from, first.charged) == (0, False)
    assert (second.set_aside_from, second.charged) == (95, True)


def test_an_exit_16_without_other_hardware_ends_the_job_when_no_older_state_is_left() -> None:
    """One failure from a state is enough, since the job would end: a first cycle from an older state is a real try."""
    found = decisions([(MOVE, cycle(95)), (MOVE, cycle(90)), (MOVE, cycle(0))])
    assert [each.set_aside_from for each in found] == [95, 90, 1]
    assert [each.action for each in found] == [Action.RESTART, Action.RESTART, Action.GIVE_UP]
    assert [each.charged for each in found] == [True, True, False]
    assert found[-1].exit_code == 16


@pytest.mark.parametrize(
    ("life", "settings", "budget"),
    [
        # The state in memory has proved good, or there was none.
        (cycle(95, 120, saved=115), SETTINGS, 50),
        (cycle(0), SETTINGS, 50),
        (cycle(None), SETTINGS, 50),
        # The user wants no restart.
        (cycle(95), SETTINGS, 0),
        (cycle(95), RestartSettings(no_restart_exit_codes=(16,)), 50),
    ],
)
def test_an_exit_16_without_other_hardware_ends_the_job_at_once(
    life: CycleLife, settings: RestartSettings, budget: int
) -> None:
    (only,) = decisions([(MOVE, life)], settings, budget)
    assert (only.action, only.exit_code) == (Action.GIVE_UP, 16)


@pytest.mark.parametrize("fault", [NAN, MOVE])
def test_a_cycle_that_saved_newer_states_is_no_failure_of_the_one_it_began_from(fault: Fault) -> None:
    """The first cycle from step 95 fails by a passing fault. The second one runs for hours and saves its own states."""
    settings = RestartSettings(same_error_limit=0, max_no_progress_cycles=0)
    cycles = [(fault, cycle(95)), (fault, cycle(95, 5010, saved=4990)), *[(fault, cycle(4990, 5010))] * 2]
    found = decisions(cycles, settings, other_hardware=True)
    assert [each.set_aside_from for each in found] == [0, 0, 0, 4990]


def test_any_cycle_that_saved_newer_states_ends_the_trial_of_the_one_it_began_from() -> None:
    cycles = [(NAN, cycle(95)), (KILLED, cycle(95, 120, saved=115)), (NAN, cycle(95))]
    assert set_aside(cycles) == [0, 0, 0]


def test_a_state_that_a_cycle_has_saved_after_is_not_set_aside_where_the_job_would_end() -> None:
    settings = RestartSettings(same_error_limit=1, max_no_progress_cycles=0)
    (only,) = decisions([(ERROR, cycle(95, saved=97))], settings)
    assert (only.action, only.exit_code, only.set_aside_from) == (Action.GIVE_UP, 93, 0)


@pytest.mark.parametrize("fault", OTHER_CAUSES.values(), ids=OTHER_CAUSES)
def test_what_no_state_causes_sets_none_aside(fault: Fault) -> None:
    settings = RestartSettings(same_error_limit=0, max_no_progress_cycles=0)
    found = decisions([(fault, cycle(95))] * 6, settings)
    assert [(each.set_aside_from, each.no_save_until) for each in found] == [(0, 0)] * 6


def test_a_kill_in_between_does_not_begin_the_count_anew() -> None:
    settings = RestartSettings(max_no_progress_cycles=0)
    cycles = [(ERROR, cycle(95)), (KILLED, cycle(95)), (ERROR, cycle(95))]
    assert [each.set_aside_from for each in decisions(cycles, settings)] == [0, 0, 95]


@pytest.mark.parametrize(
    "second",
    [
        # Another state: the job has saved since, or the step was computed again.
        (ERROR, cycle(97)),
        (ERROR, cycle(95, series="b")),
        # Another error, or another step.
        (replace(ERROR, error="KeyError at train.py:7"), cycle(95)),
        (replace(ERROR, iteration=98), cycle(95)),
        # Another kind of failure.
        (NAN, cycle(95)),
        (ERROR, cycle(0)),
        (ERROR, cycle(None)),
    ],
)
def test_another_failure_is_the_first_of_its_kind(second: tuple[Fault, CycleLife]) -> None:
    assert set_aside([(ERROR, cycle(95)), second]) == [0, 0]


def test_a_cycle_that_ended_before_it_loaded_leaves_the_count() -> None:
    assert set_aside([(ERROR, cycle(95)), (KILLED, cycle(None)), (ERROR, cycle(95))]) == [0, 0, 95]


def test_without_an_iteration_the_step_of_the_state_tells_the_same_error() -> None:
    silent = replace(ERROR, iteration=-1)
    assert set_aside([(silent, cycle(95, 99)), (silent, cycle(95, 99))]) == [0, 95]
    assert set_aside([(silent, cycle(95, 99)), (silent, cycle(95, 97))]) == [0, 0]
    assert set_aside([(silent, cycle(95, None)), (silent, cycle(95, None))]) == [0, 0]


def test_each_older_state_then_the_disk_then_the_rule_that_ends_the_job() -> None:
    """An error of the program that no state causes: memory is tried state by state, each once, then the disk."""
    states = [0, 95, 95, 90, 90, 0, 0, 0]
    found = decisions([(ERROR, cycle(state)) for state in states])
    assert [each.set_aside_from for each in found] == [0, 0, 95, 0, 90, 0, 0, 0]
    assert [each.action for each in found] == [Action.RESTART] * 7 + [Action.GIVE_UP]
    assert found[-1].exit_code == 93
    assert all(each.charged for each in found[:-1])
    assert "the same error 3 times in a row" in found[-1].reason


@pytest.mark.parametrize(
    "settings",
    [
        RestartSettings(same_error_limit=1, max_no_progress_cycles=0),
        RestartSettings(same_error_limit=0, max_no_progress_cycles=1),
    ],
)
def test_where_the_job_would_end_one_failure_from_a_state_is_enough(settings: RestartSettings) -> None:
    history = History(mark=100)
    decision, after = restart_policy.answer(ERROR, Question(settings, 5, history, cycle(95)), 0.0)
    assert (decision.action, decision.set_aside_from) == (Action.RESTART, 95)
    assert (after.same_errors, after.no_progress, after.mark) == (0, 0, 100)
    assert "from an older state than that of step 95, from which the job failed once" in decision.reason


def test_without_a_budget_the_job_ends() -> None:
    found = decisions([(ERROR, cycle(95)), (ERROR, cycle(95))], budget=1)
    assert found[-1].action is Action.GIVE_UP


def test_a_cycle_that_had_not_loaded_yet_sets_nothing_aside() -> None:
    settings = RestartSettings(same_error_limit=2)
    cycles = [(NAN, cycle(95)), (NAN, cycle(None))]
    assert [each.set_aside_from for each in decisions(cycles, settings)] == [0, 1]


@pytest.mark.parametrize("code", [17, 3])
def test_an_exit_code_that_ends_the_job_goes_first(code: int) -> None:
    settings = RestartSettings(no_restart_exit_codes=(3,))
    ending = replace(ERROR, exit_code=code)
    found = decisions([(ERROR, cycle(95)), (ending, cycle(95))], settings)
    assert found[-1].action is Action.GIVE_UP


@pytest.mark.parametrize(
    ("fault", "loaded", "saved", "not_kept"),
    [
        # One failure from a state is enough: the next start would begin with it.
        (ERROR, 95, 0, 95),
        (NAN, 95, 0, 95),
        # The states that the last cycle saved may be good; after a NaN nobody knows which of them.
        (ERROR, 0, 0, 0),
        (ERROR, 0, 97, 0),
        (ERROR, 95, 97, 0),
        (NAN, 0, 0, 1),
        (NAN, 0, 97, 1),
        (NAN, 95, 97, 96),
        (MOVE, 0, 97, 1),
        (MOVE, 95, 97, 96),
        (KILLED, 95, 0, 0),
        (KILLED, 95, 97, 0),
    ],
)
def test_a_state_that_the_job_failed_from_is_not_kept_for_a_next_start(
    fault: Fault, loaded: int, saved: int, not_kept: int
) -> None:
    (only,) = decisions([(fault, cycle(loaded, saved=saved))], budget=0)
    assert (only.action, only.set_aside_from) == (Action.GIVE_UP, not_kept)


def test_44_restarts_from_one_bad_state_are_one_fallback() -> None:
    """Megatron-LM#5281: every restart loaded the same state and failed in the next step. The state before was good."""
    settings = RestartSettings(same_error_limit=0, max_no_progress_cycles=0)
    bad, loaded, restarts = 1000, 1000, 0
    history = History()
    while loaded == bad:
        asked = Question(settings, 50, history, cycle(loaded, 1000))
        decision, history = restart_policy.answer(replace(NAN, iteration=1001), asked, 0.0)
        restarts += 1
        if decision.set_aside_from == bad:
            loaded = 900
        assert restarts < 44
    assert restarts == bad_state.FAILURES


@pytest.mark.parametrize(
    ("fault", "life", "until"),
    [
        (ERROR, cycle(95, 99), 99),
        (ERROR, cycle(0, 99), 99),
        (ERROR, replace(cycle(95, 99), last_step=100), 100),
        (ERROR, cycle(95, None), 0),
        (KILLED, cycle(95, 99), 0),
        # What was printed is read a moment later: as many steps more, but not many.
        (NAN, cycle(95, 99), 109),
        (NAN, cycle(95, 115), 135),
        (NAN, cycle(0, 5000), 5100),
        (MOVE, cycle(95, 99), 99),
    ],
)
def test_nothing_is_saved_before_the_step_of_the_fault_is_passed(fault: Fault, life: CycleLife, until: int) -> None:
    assert bad_state.no_save_until(0, fault, life) == until
    assert bad_state.no_save_until(1000, fault, life) == max(1000, until)


def test_a_decision_says_until_when_nothing_is_saved() -> None:
    cycles = [(KILLED, cycle(0)), (ERROR, cycle(0)), (KILLED, cycle(95)), (NAN, cycle(95)), (ERROR, cycle(95))]
    settings = RestartSettings(max_no_progress_cycles=0)
    assert [decision.no_save_until for decision in decisions(cycles, settings)] == [0, 99, 99, 109, 109]
