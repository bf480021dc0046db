"""Fault, history and now in; a decision with its reason out. Pure.

Knows no process, no clock and no store. The same reason feeds log, journal and console.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from ft_launcher.attribution import Fault, FaultKind
from rank_monitor.contract.config import RestartSettings
from rank_monitor.contract.exit_codes import ExitCode, passed_on


class Action(Enum):
    """What to do after a failed cycle."""

    RESTART = "restart"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Decision:
    """What to do and why. `exit_code` is the launcher's, when it gives up."""

    action: Action
    reason: str
    charged: bool = False
    restarts_left: int = 0
    exit_code: int | None = None


@dataclass(frozen=True)
class History:
    """Moments (monotonic seconds) of the restarts charged to the budget so far."""

    charged: tuple[float, ...] = ()

    def after(self, decision: Decision, now: float) -> History:
        """The history with this decision in it."""
        return replace(self, charged=(*self.charged, now)) if decision.charged else self


def decide(fault: Fault, history: History, settings: RestartSettings, max_restarts: int, now: float) -> Decision:
    """Whether the job restarts after `fault`.

    Args:
        fault: what ended the cycle.
        history: restarts so far.
        settings: the policy.
        max_restarts: the budget, per job or per `restart_window`.
        now: monotonic seconds.
    """
    if fault.exit_code == ExitCode.FAILED_ON_RESULT_VALIDATION:
        return Decision(
            Action.GIVE_UP,
            "the rank failed on result validation (exit code 17); a restart would compute the same",
            exit_code=int(ExitCode.FAILED_ON_RESULT_VALIDATION),
        )
    if fault.exit_code in settings.no_restart_exit_codes:
        return Decision(
            Action.GIVE_UP,
            f"exit code {fault.exit_code} is one of --ft-no-restart-exit-codes",
            exit_code=settings.no_restart_exit_code,
        )
    window = settings.restart_window
    spent = sum(1 for at in history.charged if window is None or at > now - window)
    left = max_restarts - spent
    span = "" if window is None else f" within {window:g} s"
    if left > 0:
        reason = f"restart {spent + 1} of {max_restarts}{span}"
        return Decision(Action.RESTART, reason, charged=True, restarts_left=left - 1)
    reason = (
        "no restarts allowed (--max-restarts 0)" if max_restarts == 0 else f"all {max_restarts} restarts{span} spent"
    )
    return Decision(Action.GIVE_UP, reason, exit_code=_final_code(fault, settings))


def _final_code(fault: Fault, settings: RestartSettings) -> int:
    if settings.exit_code == "one":
        return int(ExitCode.RANKS_FAILED)
    if fault.kind is FaultKind.HANG:
        return int(ExitCode.HANG)
    return int(ExitCode.RANKS_FAILED) if fault.agreed_exit_code is None else passed_on(fault.agreed_exit_code)
