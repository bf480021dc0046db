"""Fault and history to decision, by tables."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_client.control import WorkloadAction
from ft_launcher.decide.attribution import Fault, FaultClass, FaultKind
from ft_launcher.decide.policy import restart_policy
from ft_launcher.decide.policy.ended_cycle import YOUNG, CycleLife, ended_cycle
from ft_launcher.decide.policy.restart_policy import (
    MAX_MOVES,
    MAX_UNCHARGED,
    Action,
    Decision,
    Question,
    about_policy,
    after_request,
    answer,
    backoff_s,
    is_known,
    is_suspect,
)
from rank_monitor.contract.restart_history import History
from rank_monitor.contract.settings.config import RestartSettings
from rank_monitor.contract.wire.messages import NO_ITERATION, ControlRequest
from tests.program import python

CRASH = Fault(FaultKind.EXIT, 1, 1, 101, 3, "exited with code 3", "", "", agreed_exit_code=3)
HANG = replace(CRASH, kind=FaultKind.HANG, exit_code=-9, agreed_exit_code=-9)
MOVE = replace(CRASH, exit_code=16, agreed_exit_code=16)
ONCE = RestartSettings()
SAME = History(error="ValueError at train.py:7", error_iteration=4, same_errors=3)
SILENT = History(error="ValueError at train.py:7", same_errors=3)
TWICE_EARLY = replace(SILENT, same_errors=2, early_errors=2)
STUCK = History(mark=4, no_progress=3)


def decide(
    fault: Fault, history: History, settings: RestartSettings, budget: int, now: float, other_hardware: bool = False
) -> Decision:
    return restart_policy.decide(fault, Question(settings, budget, history, other_hardware=other_hardware), now)


@pytest.mark.parametrize(
    ("spent", "budget", "action", "left", "reason"),
    [
        (0, 0, Action.GIVE_UP, 0, "no restarts allowed"),
        (0, 1, Action.RESTART, 0, "restart 1 of 1"),
        (1, 3, Action.RESTART, 1, "restart 2 of 3"),
        (3, 3, Action.GIVE_UP, 0, "all 3 restarts spent"),
    ],
)
def test_budget(spent: int, budget: int, action: Action, left: int, reason: str) -> None:
    decision = decide(CRASH, History(tuple(range(spent))), ONCE, budget, now=100.0)
    assert (decision.action, decision.restarts_left) == (action, left)
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("history", "iteration", "settings", "budget"),
    [
        (History(), NO_ITERATION, ONCE, "no progress makes the budget whole again, since no iteration is reported"),
        (History(), 40, ONCE, "the budget is whole again once the training is beyond iteration 40"),
        (
            *(History((1.0,), mark=40), 40, RestartSettings(min_progress_iterations=10)),
            "the budget is whole again once the training is beyond iteration 49",
        ),
        (
            *(History((1.0,), mark=40), 41, ONCE),
            "the progress to iteration 41 gave back what was spent, and the budget is whole again once the training is "
            "beyond iteration 41",
        ),
        (
            *(History((1.0,)), NO_ITERATION, RestartSettings(restart_window=60.0)),
            "the budget is whole again 60 s after the last restart",
        ),
        (
            *(History(mark=7), 7, RestartSettings(restart_window=60.0)),
            "the budget is whole again once the training is beyond iteration 7 or 60 s after the last restart",
        ),
    ],
)
def test_when_the_budget_is_whole_again(
    history: History, iteration: int, settings: RestartSettings, budget: str
) -> None:
    question = Question(settings, 3, history, CycleLife(10.0, iteration))
    assert restart_policy.answer(CRASH, question, now=2.0)[0].budget == budget


def test_a_restart_that_is_not_charged_says_nothing_of_the_budget() -> None:
    question = Question(ONCE, 3, History(), CycleLife(10.0, 4), other_hardware=True)
    decision, _ = restart_policy.answer(MOVE, question, now=2.0)
    assert not decision.charged and decision.budget == ""


def test_a_window_forgets() -> None:
    settings = RestartSettings(restart_window=50.0)
    history = History((10.0, 60.0))
    assert decide(CRASH, history, settings, 2, now=100.0).action is Action.RESTART
    assert decide(CRASH, history, settings, 2, now=55.0).action is Action.GIVE_UP


@pytest.mark.parametrize(
    ("fault", "settings", "code"),
    [
        (CRASH, ONCE, 3),
        (HANG, ONCE, 85),
        (replace(CRASH, agreed_exit_code=-9), ONCE, 137),
        (replace(CRASH, agreed_exit_code=2), ONCE, 1),
        (replace(CRASH, agreed_exit_code=85), ONCE, 1),
        (replace(CRASH, agreed_exit_code=None), ONCE, 1),
        (CRASH, RestartSettings(exit_code="one"), 1),
        (HANG, RestartSettings(exit_code="one"), 1),
        (replace(CRASH, exit_code=17), ONCE, 17),
        (MOVE, ONCE, 16),
        (CRASH, RestartSettings(no_restart_exit_codes=(3,)), 93),
        (CRASH, RestartSettings(no_restart_exit_codes=(3,), no_restart_exit_code=7), 7),
    ],
)
def test_final_exit_code(fault: Fault, settings: RestartSettings, code: int) -> None:
    assert decide(fault, History(), settings, 0, now=0.0).exit_code == code


@pytest.mark.parametrize(
    ("fault", "history", "settings", "code", "reason"),
    [
        (
            replace(CRASH, exit_code=17),
            History(),
            ONCE,
            17,
            "exit code 17: result could not be validated; the rank asks for the end",
        ),
        (MOVE, History(moves=1), ONCE, 16, "there is none"),
        (CRASH, History(), RestartSettings(no_restart_exit_codes=(3,)), 93, "--ft-no-restart-exit-codes"),
        (CRASH, SAME, ONCE, 93, "the same error 3 times in a row: ValueError at train.py:7 at iteration 4"),
        (CRASH, replace(SAME, same_errors=1), RestartSettings(same_error_limit=1), 93, "the same error once"),
        (CRASH, SILENT, ONCE, 93, "the same error 3 times in a row, each within 10 minutes: ValueError at train.py:7"),
        (
            CRASH,
            TWICE_EARLY,
            ONCE,
            93,
            "the same error 2 times in a row, each within 60 s and before any process group: ValueError at train.py:7",
        ),
        (CRASH, TWICE_EARLY, RestartSettings(same_error_limit=2), 93, "2 times in a row, each within 10 minutes"),
        (CRASH, STUCK, ONCE, 93, "no progress in 3 cycles in a row: none came beyond iteration 4"),
        (CRASH, STUCK, RestartSettings(min_progress_iterations=10), 93, "beyond iteration 13"),
        (CRASH, STUCK, RestartSettings(no_restart_exit_code=7), 7, "no progress"),
        (HANG, STUCK, RestartSettings(exit_code="one"), 93, "no progress"),
    ],
)
@pytest.mark.parametrize("budget", [0, 10])
def test_not_restarted_whatever_the_budget(
    fault: Fault, history: History, settings: RestartSettings, code: int, reason: str, budget: int
) -> None:
    decision = decide(fault, history, settings, budget, now=0.0)
    assert (decision.action, decision.exit_code, decision.charged) == (Action.GIVE_UP, code, False)
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("history", "settings"),
    [
        (replace(SAME, same_errors=2), ONCE),
        (SAME, RestartSettings(same_error_limit=0)),
        (replace(TWICE_EARLY, early_errors=1), ONCE),
        (TWICE_EARLY, RestartSettings(same_error_limit=0)),
        (replace(STUCK, no_progress=2), ONCE),
        (STUCK, RestartSettings(max_no_progress_cycles=0)),
    ],
)
def test_restarted_below_the_limit_or_without_one(history: History, settings: RestartSettings) -> None:
    assert decide(CRASH, history, settings, 1, now=0.0).action is Action.RESTART


@pytest.mark.parametrize("moves", [0, 1, MAX_MOVES])
def test_a_move_to_other_hardware_is_not_charged(moves: int) -> None:
    history = History((1.0,), moves=moves, young=3)
    decision = decide(MOVE, history, RestartSettings(backoff=(1.0, 60.0)), 1, now=5.0, other_hardware=True)
    assert (decision.action, decision.charged, decision.restarts_left) == (Action.RESTART, False, 0)
    assert "not charged" in decision.reason and decision.wait_s == 0


def test_too_many_moves_in_a_row_are_charged() -> None:
    history = History(moves=MAX_MOVES + 1)
    assert decide(MOVE, history, ONCE, 1, now=5.0, other_hardware=True).charged
    decision = decide(MOVE, history, ONCE, 0, now=5.0, other_hardware=True)
    assert (decision.action, decision.exit_code) == (Action.GIVE_UP, 16)


TOLD = replace(CRASH, kind=FaultKind.SIGNAL, exit_code=-15, agreed_exit_code=-15, fault_class=FaultClass.PREEMPTION)


@pytest.mark.parametrize(
    ("in_a_row", "budget", "action", "charged"),
    [
        (1, 1, Action.RESTART, False),
        (MAX_UNCHARGED, 1, Action.RESTART, False),
        (MAX_UNCHARGED + 1, 1, Action.RESTART, True),
        (1, 0, Action.GIVE_UP, False),
    ],
)
def test_a_rank_that_was_told_to_end(in_a_row: int, budget: int, action: Action, charged: bool) -> None:
    decision = decide(TOLD, History(same_class=in_a_row), ONCE, budget, now=0.0)
    assert (decision.action, decision.charged) == (action, charged)
    assert decision.exit_code == (143 if action is Action.GIVE_UP else None)


def test_it_goes_on_although_the_budget_is_spent() -> None:
    assert decide(TOLD, History((1.0,), same_class=1), ONCE, 1, now=5.0).action is Action.RESTART
    assert decide(TOLD, History((1.0,), same_class=MAX_UNCHARGED + 1), ONCE, 1, now=5.0).action is Action.GIVE_UP


def test_suspected_hardware_is_left_where_there_is_other() -> None:
    suspect = replace(CRASH, fault_class=FaultClass.HARDWARE)
    assert is_suspect(suspect) and is_suspect(MOVE) and not is_suspect(CRASH)
    decision = decide(suspect, History(), ONCE, 0, now=0.0, other_hardware=True)
    assert decision.action is Action.RESTART and not decision.charged and "another node" in decision.reason
    often = History(same_class=MAX_UNCHARGED + 1)
    decision = decide(suspect, often, ONCE, 1, now=0.0, other_hardware=True)
    assert decision.charged and decision.reason == "restart 1 of 1, on other hardware"
    assert decide(suspect, often, ONCE, 0, now=0.0, other_hardware=True).action is Action.GIVE_UP
    assert decide(suspect, History(), ONCE, 1, now=0.0).reason == "restart 1 of 1"
    assert decide(CRASH, History(), ONCE, 1, now=0.0, other_hardware=True).reason == "restart 1 of 1"


@pytest.mark.parametrize(
    ("young", "bounds", "wait_s"),
    [
        (0, (1.0, 60.0), 0.0),
        (1, (1.0, 60.0), 1.0),
        (2, (1.0, 60.0), 2.0),
        (4, (1.0, 60.0), 8.0),
        (7, (1.0, 60.0), 60.0),
        (10**6, (1.0, 60.0), 60.0),
        (9, (0.0, 0.0), 0.0),
        (1, (0.0, 5.0), 0.0),
        (2, (0.0, 5.0), 1.0),
        (3, (0.0, 5.0), 2.0),
        (5, (0.0, 5.0), 5.0),
        (1, (0.5, 0.5), 0.5),
        (10**6, (0.0, 0.5), 0.5),
    ],
)
def test_the_wait_doubles_up_to_its_bound(young: int, bounds: tuple[float, float], wait_s: float) -> None:
    assert backoff_s(young, *bounds) == wait_s
    assert decide(CRASH, History(young=young), RestartSettings(backoff=bounds), 1, now=0.0).wait_s == wait_s


BOUNDS = st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)).map(lambda pair: (min(pair), max(pair)))


@given(st.integers(0, 2000), BOUNDS)
def test_the_wait_never_shrinks_and_keeps_its_bounds(young: int, bounds: tuple[float, float]) -> None:
    least_s, most_s = bounds
    wait_s = backoff_s(young, least_s, most_s)
    assert wait_s <= backoff_s(young + 1, least_s, most_s) <= most_s
    assert young == 0 or wait_s >= least_s


@pytest.mark.parametrize(
    ("request_", "action", "code", "reason"),
    [
        (ControlRequest("restart", "slow"), Action.RESTART, None, "rank 5 asked for it: slow; not charged"),
        (ControlRequest("stop_job", ""), Action.GIVE_UP, 95, "rank 5 asked for it"),
        (ControlRequest("exclude_this_node", "bad GPU"), Action.LEAVE, 94, "rank 5 asked for it: bad GPU"),
        (ControlRequest("stop_job", " a\nb "), Action.GIVE_UP, 95, "rank 5 asked for it: a b"),
    ],
    ids=lambda value: getattr(value, "action", None),
)
def test_requests(request_: ControlRequest, action: Action, code: int | None, reason: str) -> None:
    decision = after_request(request_, 5, Question(ONCE, 3, History((1.0,))), now=5.0)
    assert (decision.action, decision.exit_code, decision.reason) == (action, code, reason)
    assert not decision.charged and decision.restarts_left == (2 if action is Action.RESTART else 0)


def test_every_request_of_the_client_is_known() -> None:
    assert all(is_known(ControlRequest(action.value, "")) for action in WorkloadAction)
    assert not is_known(ControlRequest("dance", ""))


MIN_HEALTHY = RestartSettings(restart_policy="min-healthy")


def test_min_healthy_is_warned_of_where_it_does_not_help() -> None:
    assert about_policy(ONCE, 1) == about_policy(ONCE, 4) == []
    assert "one node" in about_policy(MIN_HEALTHY, 1)[0]
    assert "in-process" in about_policy(MIN_HEALTHY, 4)[0]


HISTORIES = st.builds(
    History,
    charged=st.lists(st.floats(0, 1000), max_size=6).map(tuple),
    mark=st.none() | st.integers(0, 10),
    no_progress=st.integers(0, 5),
    error=st.sampled_from(["", "ValueError at a.py:1"]),
    same_errors=st.integers(0, 5),
    moves=st.integers(0, 5),
    young=st.integers(0, 5),
    same_class=st.integers(0, 5),
)
FAULTS = st.builds(
    lambda code, kind, fault_class: replace(
        CRASH, exit_code=code, agreed_exit_code=code, kind=kind, fault_class=fault_class
    ),
    st.sampled_from([1, 2, 3, 16, 17, 85, 93, -9, -15]),
    st.sampled_from(FaultKind),
    st.sampled_from(FaultClass),
)


@given(FAULTS, HISTORIES, st.integers(0, 8), st.booleans())
def test_every_decision_is_whole(fault: Fault, history: History, budget: int, other_hardware: bool) -> None:
    decision = decide(fault, history, RestartSettings(backoff=(1.0, 8.0)), budget, 1000.0, other_hardware)
    assert decision.reason and json.dumps(decision.reason)
    assert (decision.exit_code is None) == (decision.action is Action.RESTART)
    assert 0 <= decision.restarts_left <= budget
    if decision.action is not Action.RESTART:
        assert not decision.charged and decision.wait_s == 0 and 0 < (decision.exit_code or 0) < 256
    assert not decision.charged or len(history.charged) < budget


@given(FAULTS, HISTORIES, st.integers(0, 8))
def test_a_charged_restart_is_remembered(fault: Fault, history: History, budget: int) -> None:
    ended = history.ended(ended_cycle(fault, CycleLife()), 1, 1000.0, young_s=YOUNG * ONCE.backoff[1])
    decision, after = answer(fault, Question(ONCE, budget, history), 1000.0)
    charged = ended.charged
    if decision.charged:
        charged = (*charged, 1000.0)
    assert after == replace(ended, charged=charged)


def test_deciding_needs_no_torch() -> None:
    code = "import sys, ft_launcher.decide.policy.restart_policy; assert not {'torch', 'numpy'} & set(sys.modules)"
    python(code)
