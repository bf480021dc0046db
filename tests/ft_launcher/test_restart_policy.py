"""Fault and history to decision, by tables."""

from dataclasses import replace

import pytest

from ft_launcher.attribution import Fault, FaultKind
from ft_launcher.restart_policy import Action, History, decide
from rank_monitor.contract.config import RestartSettings

CRASH = Fault(FaultKind.EXIT, 1, 1, 101, 3, "exited with code 3", "", "", agreed_exit_code=3)
HANG = replace(CRASH, kind=FaultKind.HANG, exit_code=-9, agreed_exit_code=-9)
ONCE = RestartSettings()


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
        (CRASH, RestartSettings(no_restart_exit_codes=(3,)), 93),
        (CRASH, RestartSettings(no_restart_exit_codes=(3,), no_restart_exit_code=7), 7),
    ],
)
def test_final_exit_code(fault: Fault, settings: RestartSettings, code: int) -> None:
    assert decide(fault, History(), settings, 0, now=0.0).exit_code == code


@pytest.mark.parametrize("fault", [replace(CRASH, exit_code=17), CRASH])
def test_not_restarted_whatever_the_budget(fault: Fault) -> None:
    decision = decide(fault, History(), RestartSettings(no_restart_exit_codes=(3,)), 10, now=0.0)
    assert decision.action is Action.GIVE_UP and not decision.charged


def test_a_charged_restart_enters_the_history() -> None:
    decision = decide(CRASH, History(), ONCE, 2, now=5.0)
    assert History().after(decision, 5.0).charged == (5.0,)
