"""The restart policy: a fault, the question about it and the time in; a decision with its reason out. Pure.

`answer` adds the failed cycle to the history and decides by `decide`, in this order:

1. Ends that nothing prevents: a result that could not be validated, an exit code of the user's list (`_ends_at_once`).
2. A state in memory that is bad is set aside, and the job goes on from an older one, if the budget has a restart for
   that (`bad_state.py`). Where the next rule would end the job, one failure from the state is enough. So it is after
   exit code 16, too: from an older state the same hardware computes other steps.
3. Ends that no budget prevents: no other hardware, the same error too often, no progress (`_not_restarted`).
4. Restarts that cost nothing: a move to other hardware, hardware that a waiting node replaces, a preemption
   (`_reason_not_charged`). Each is bounded, so that it cannot go on for ever.
5. The budget: a charged restart, after a wait where the cycle died young; or the end of the job.

`job_policy.py` calls `answer` for each fault of a job, and `after_request` for a request of a rank; `ft_launcher
replay` calls both again with what the journal holds. Log, journal and console show the same reason. What is remembered
between two decisions is the `History` of the contract; `ended_cycle.py` makes what the history gets of a cycle.
docs/restart_policy.md has the rules as tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any

from ft_launcher.decide.attribution import Fault, FaultClass, FaultKind
from ft_launcher.decide.attribution.fault import doubt_text
from ft_launcher.decide.policy import bad_state
from ft_launcher.decide.policy.ended_cycle import BRIEF_S, EARLY_S, YOUNG, CycleLife, ended_cycle
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.exit_codes import ExitCode, passed_on
from rank_monitor.contract.restart_history import History, StateTrial
from rank_monitor.contract.settings.config import RestartSettings
from rank_monitor.contract.wire.json_record import from_json, to_json
from rank_monitor.contract.wire.messages import NO_ITERATION, ControlRequest

# Without these two bounds a fault that recurs on every node would restart for ever and spend no budget.
MAX_MOVES = 3
"""How many exits with code 16 in a row are not charged."""

MAX_UNCHARGED = 3
"""How many cycles in a row that ended by preemption, or by hardware that a waiting node replaces, are not charged."""

# Characters of the description of a request. A rank chooses the text, and it becomes part of one line.
_MAX_DESCRIPTION = 200
MAX_EARLY = 2
"""How many times in a row the same error before any process group ends the job. A single one is no proof: it may be
about a file that another program was just writing."""

_MIN_HEALTHY = "min-healthy"
_NOT_ASKED = ("checkpoint_iteration_file", "max_no_progress_restarts", "restart_policy", "soft_timeout_limit")
"""Settings that a record of a question leaves out, since other parts of the launcher read them and no decision does.
One is a path of the user's, which must not get into a record."""

_OF_LIFE = tuple(each.name for each in fields(CycleLife))
_MAX_CHARGED = 1 << 20
"""Charged restarts that are read from a record. Anyone may have written a journal, and a number in it must not fill the
memory."""


class Action(Enum):
    """What to do after a cycle."""

    RESTART = "restart"
    GIVE_UP = "give up"
    LEAVE = "leave"


REQUESTS: dict[str, tuple[Action, ExitCode | None]] = {
    "exclude_this_node": (Action.LEAVE, ExitCode.NODE_EXCLUDED),
    "stop_job": (Action.GIVE_UP, ExitCode.JOB_STOPPED),
    "restart": (Action.RESTART, None),
}
"""The actions of a `ControlRequest`, as the client names them: what follows, and the launcher's exit code."""


@dataclass(frozen=True)
class Decision:
    """What to do and why. `exit_code` is the launcher's, when it ends; `wait_s` is the wait before a restart.

    `not_restartable`: a new launch would fail in the same way. The exit code alone does not show that, since the user
    may have chosen it (`--ft-no-restart-exit-code`). `budget`: of a restart that is charged, when the budget is whole
    again, and whether it was given back just now. `set_aside_from`: states in memory of this step and of later ones are
    not used any more, nor kept for a next start where the job ends; 0: all may be. `no_save_until`: the step that the
    training must pass before it saves its state in memory again; 0: none.
    """

    action: Action
    reason: str
    charged: bool = False
    restarts_left: int = 0
    exit_code: int | None = None
    wait_s: float = 0.0
    not_restartable: bool = False
    budget: str = ""
    set_aside_from: int = 0
    no_save_until: int = 0


@dataclass(frozen=True)
class Question:
    """All that the restart policy decides by, except the fault. The journal holds it with each decision.

    Attributes:
        settings, max_restarts: the options of the policy, and `--max-restarts`.
        history: the history of the job. For `answer` without the cycle that has just failed; for `decide` with it
            (`History.ended`).
        life: how long the failed cycle ran, and how far it came.
        other_hardware: there is another device or node that a restart would use. The record has it as `elsewhere`.
    """

    settings: RestartSettings
    max_restarts: int
    history: History = field(default_factory=History)
    life: CycleLife = field(default_factory=CycleLife)
    other_hardware: bool = False

    def to_record(self, now: float) -> dict[str, Any]:
        """Returns JSON values, with ages in seconds instead of times."""
        settings = {name: value for name, value in to_json(self.settings).items() if name not in _NOT_ASKED}
        history = self.history.to_record(now)
        if self.settings.restart_window is None:
            # Without a window only the number of charged restarts counts, and a job may have thousands.
            history["charged"] = len(history["charged"])
        return {
            "settings": settings,
            "max_restarts": self.max_restarts,
            "history": history,
            **asdict(self.life),
            "elsewhere": self.other_hardware,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], now: float) -> Question:
        """Returns the question in a record of `to_record`, which another release may have written: a missing setting
        has its default, and an unknown one is ignored.

        Args:
            now: the moment at which the ages in the record are taken (monotonic seconds).

        Raises:
            ProtocolError: `record` is no such record.
        """
        try:
            history = dict(record["history"])
            if type(history.get("charged")) is int and 0 <= history["charged"] <= _MAX_CHARGED:
                history["charged"] = [0.0] * history["charged"]
            return cls(
                from_json(RestartSettings, record["settings"], ignore_unknown=True),
                int(record["max_restarts"]),
                History.from_record(history, now),
                from_json(CycleLife, {name: record[name] for name in _OF_LIFE if name in record}),
                bool(record["elsewhere"]),
            )
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ProtocolError(f"a question to the restart policy does not fit: {error!r}") from None


def answer(fault: Fault, question: Question, now: float) -> tuple[Decision, History]:
    """Returns what follows a fault, and the history after it, with the failed cycle and a charged restart in it.

    Args:
        question: with the history before the failed cycle.
        now: monotonic seconds.
    """
    settings = question.settings
    history = question.history.ended(
        ended_cycle(fault, question.life),
        settings.min_progress_iterations,
        now,
        window_s=settings.restart_window,
        young_s=YOUNG * settings.backoff[1],
    )
    before, life = question.history, question.life
    history = replace(
        history,
        trial=bad_state.tried(before.trial, fault, life),
        no_save_until=bad_state.no_save_until(before.no_save_until, fault, life),
    )
    decision = decide(fault, replace(question, history=history), now)
    if decision.charged:
        decision = replace(decision, budget=_about_budget(question.history, history, settings))
        history = replace(history, charged=(*history.charged, now))
    if decision.set_aside_from:
        history = history.from_older_state()
    if decision.action is Action.RESTART:
        decision = replace(decision, no_save_until=history.no_save_until)
    else:
        decision = replace(decision, set_aside_from=bad_state.not_to_keep(history.trial, fault, life))
    return decision, history


def _about_budget(before: History, after: History, settings: RestartSettings) -> str:
    """Returns in words when the budget is whole again, and whether progress has just given it back.

    Args:
        before: the history without the failed cycle.
        after: the history with the failed cycle, before the restart is charged.
    """
    ways = []
    if after.mark is not None:
        ways.append(
            f"once the training is beyond iteration {after.mark + max(1, settings.min_progress_iterations) - 1}"
        )
    if settings.restart_window is not None:
        ways.append(f"{settings.restart_window:g} s after the last restart")
    if not ways:
        return "no progress makes the budget whole again, since no iteration is reported"
    text = f"the budget is whole again {' or '.join(ways)}"
    if before.charged and after.mark != before.mark:
        return f"the progress to iteration {after.mark} gave back what was spent, and {text}"
    return text


def inputs_of(
    fault: Fault, question: Question, now: float, by_views: int = 0, returned: Mapping[int, float] | None = None
) -> dict[str, Any]:
    """Returns what a decision is made of as JSON values, beside what the event of the fault holds.

    Args:
        by_views: the number of nodes whose views of their ranks the fault was found by; 0: by the evidence of its own
            node.
        returned: seconds since the return, by global rank, of the ranks by which all nodes together found the fault.
    """
    found = question.to_record(now) | {"agreed_exit_code": fault.agreed_exit_code, "by_views": by_views}
    if returned:
        found["returned"] = {str(rank): ago_s for rank, ago_s in returned.items()}
    return found


def decide(fault: Fault, question: Question, now: float) -> Decision:
    """Returns whether the job restarts after `fault`, and why. The module's docstring has the order of the rules.

    Args:
        question: its history contains the failed cycle.
        now: monotonic seconds.
    """
    final = _ends_at_once(fault, question)
    if final is not None:
        return final
    settings, max_restarts, left = question.settings, question.max_restarts, _left(question, now)
    final = _not_restarted(fault, question)
    trial = question.history.trial
    # A user who lists exit code 16 wants no restart after it.
    may_fall_back = left > 0 and fault.exit_code not in settings.no_restart_exit_codes
    is_bad = may_fall_back and bad_state.to_set_aside(trial, fault, question.life, would_end=final is not None)
    if final is not None and not is_bad:
        return final
    not_charged = _reason_not_charged(fault, question)
    if not_charged is not None and not is_bad:
        return Decision(Action.RESTART, f"{not_charged}, not charged", restarts_left=left)
    if settings.restart_window is None:
        span = ""
    else:
        span = f" within {settings.restart_window:g} s"
    if left > 0:
        reason = f"restart {max_restarts - left + 1} of {max_restarts}{span}"
        if question.other_hardware and is_suspect(fault):
            reason += ", on other hardware"
        set_aside_from = 0
        if is_bad:
            set_aside_from = trial.step
            reason += f", from an older state than that of step {trial.step}, {_about_trial(trial)}"
        wait_s = backoff_s(question.history.young, *settings.backoff)
        return Decision(
            Action.RESTART,
            reason,
            charged=True,
            restarts_left=left - 1,
            wait_s=wait_s,
            set_aside_from=set_aside_from,
        )
    if max_restarts == 0:
        reason = "no restarts allowed (--max-restarts 0)"
    else:
        reason = f"all {max_restarts} restarts{span} spent"
    return Decision(Action.GIVE_UP, reason, exit_code=_final_code(fault, settings))


def _about_trial(trial: StateTrial) -> str:
    """Returns why a state is set aside, in words."""
    times = {1: "once", 2: "twice"}.get(trial.failures, f"{trial.failures} times")
    return f"from which the job failed {times} ({trial.suspicion})"


def is_suspect(fault: Fault) -> bool:
    """Returns whether the ranks of the faulty node or device should run on other hardware, if there is some."""
    return fault.exit_code == ExitCode.RESUME_TO_DISAMBIGUATE or fault.fault_class is FaultClass.HARDWARE


def _reason_not_charged(fault: Fault, question: Question) -> str | None:
    """Returns why the restart costs nothing; None: the restart is charged to the budget."""
    history = question.history
    if fault.exit_code == ExitCode.RESUME_TO_DISAMBIGUATE and history.moves <= MAX_MOVES:
        return f"exit code 16: move {max(1, history.moves)} of {MAX_MOVES} to other hardware"
    if history.same_class > MAX_UNCHARGED:
        return None
    times = f"{fault.fault_class.value}, {max(1, history.same_class)} of {MAX_UNCHARGED} in a row"
    if fault.fault_class is FaultClass.HARDWARE and question.other_hardware:
        return f"{times}: another node takes the place"
    # `--max-restarts 0` means no restart at all, also after a preemption.
    if fault.fault_class is FaultClass.PREEMPTION and question.max_restarts > 0:
        return f"{times}: a rank was told to end"
    return None


def _ends_at_once(fault: Fault, question: Question) -> Decision | None:
    """Returns the decision to end the job where the exit code alone asks for it, whatever state the next cycle would go
    on from; None: it does not."""
    if fault.exit_code == ExitCode.FAILED_ON_RESULT_VALIDATION:
        if fault.doubt:
            about = doubt_text(fault.doubt)
        else:
            about = "the rank asks for the end of the job, and its log says why"
        reason = f"exit code 17: result could not be validated; {about}"
        return Decision(Action.GIVE_UP, reason, exit_code=int(ExitCode.FAILED_ON_RESULT_VALIDATION))
    has_own_row = fault.exit_code == ExitCode.RESUME_TO_DISAMBIGUATE and not question.other_hardware
    if fault.exit_code in question.settings.no_restart_exit_codes and not has_own_row:
        reason = f"exit code {fault.exit_code} is one of --ft-no-restart-exit-codes"
        code = question.settings.no_restart_exit_code
        return Decision(Action.GIVE_UP, reason, exit_code=code, not_restartable=True)
    return None


def _not_restarted(fault: Fault, question: Question) -> Decision | None:
    """Returns the decision to end the job where a restart from the same state would not help, whatever the budget;
    None: it may help."""
    history, settings = question.history, question.settings
    if fault.exit_code == ExitCode.RESUME_TO_DISAMBIGUATE and not question.other_hardware:
        reason = "the rank wants to go on on other hardware (exit code 16), and there is none"
        return Decision(Action.GIVE_UP, reason, exit_code=int(ExitCode.RESUME_TO_DISAMBIGUATE))
    if _is_same_error(question):
        reason = _about_same_error(history, settings.same_error_limit)
    elif _lacks_progress(question):
        best = (history.mark or 0) + max(1, settings.min_progress_iterations) - 1
        reason = f"no progress in {history.no_progress} cycles in a row: none came beyond iteration {best}"
    else:
        return None
    return Decision(Action.GIVE_UP, reason, exit_code=settings.no_restart_exit_code, not_restartable=True)


def _is_same_error(question: Question) -> bool:
    """Returns whether the same error came too often."""
    history, limit = question.history, question.settings.same_error_limit
    return bool(limit) and (history.same_errors >= limit or history.early_errors >= MAX_EARLY)


def _lacks_progress(question: Question) -> bool:
    """Returns whether too many cycles in a row came no further."""
    return 0 < question.settings.max_no_progress_cycles <= question.history.no_progress


def _about_same_error(history: History, limit: int) -> str:
    """Returns the reason where the same error ends the job: how often it came, and by which of the three rules
    (docs/restart_policy.md, "The same error") it counts as the same."""
    if history.same_errors > 1:
        times = f"{history.same_errors} times in a row"
    else:
        times = "once"
    if history.error_iteration != NO_ITERATION:
        return f"the same error {times}: {history.error} at iteration {history.error_iteration}"
    if history.same_errors < limit:
        return f"the same error {times}, each within {EARLY_S:g} s and before any process group: {history.error}"
    return f"the same error {times}, each within {BRIEF_S / 60:g} minutes: {history.error}"


def final_codes(settings: RestartSettings) -> set[int]:
    """Returns the exit codes of ranks that end a cycle even where the ranks restart in process: 16, 17, and those of
    `--ft-no-restart-exit-codes`. They ask for more than a restart in process can do."""
    ours = {int(ExitCode.RESUME_TO_DISAMBIGUATE), int(ExitCode.FAILED_ON_RESULT_VALIDATION)}
    return ours | set(settings.no_restart_exit_codes)


def backoff_s(young: int, least_s: float, most_s: float) -> float:
    """Returns seconds to wait after `young` cycles in a row that died young: doubling from `least_s` to `most_s`.

    With `least_s` 0 the first restart comes at once, and the doubling begins at 1 s.
    """
    if young == 0:
        return 0.0
    if least_s:
        first_s, doublings = least_s, young - 1
    elif young == 1:
        return 0.0
    else:
        first_s, doublings = 1.0, young - 2
    # The power of a float overflows at 2 ** 1024; 64 doublings are beyond any `most_s`.
    return min(most_s, first_s * 2.0 ** min(doublings, 64))


def _final_code(fault: Fault, settings: RestartSettings) -> int:
    """Returns the exit code of a launcher that gives up: the code that all failed ranks have in common, if the user
    wants it passed on, else one that says that ranks failed or hung."""
    if settings.exit_code == "one":
        return int(ExitCode.RANKS_FAILED)
    if fault.kind is FaultKind.HANG:
        return int(ExitCode.HANG)
    if fault.agreed_exit_code is None:
        return int(ExitCode.RANKS_FAILED)
    return passed_on(fault.agreed_exit_code)


def _left(question: Question, now: float) -> int:
    """Returns how many charged restarts are left: `--max-restarts` without those within the window."""
    return max(0, question.max_restarts - len(question.history.within(question.settings.restart_window, now)))


def is_known(request: ControlRequest) -> bool:
    """Returns whether the action of a request is known. A request with an unknown action ends no cycle."""
    return request.action in REQUESTS


def asks_for_restart(request: ControlRequest) -> bool:
    """Whether the ranks are to go on after a request, so that the launcher of no node ends."""
    return REQUESTS[request.action][0] is Action.RESTART


def asked_by(rank: int, request: ControlRequest) -> str:
    """Returns in one line which rank made a request, with the rank's description."""
    description = " ".join(request.description.split())[:_MAX_DESCRIPTION]
    if description:
        return f"rank {rank} asked for it: {description}"
    return f"rank {rank} asked for it"


def after_request(request: ControlRequest, rank: int, question: Question, now: float) -> Decision:
    """Decides about a request of the training. LEAVE concerns the node of `rank` alone.

    Args:
        request: what `rank` asks for; `is_known` holds for it.
        question: with the history so far.
        now: monotonic seconds.
    """
    (action, code), asks = REQUESTS[request.action], asked_by(rank, request)
    if code is None:
        return Decision(action, f"{asks}; not charged", restarts_left=_left(question, now))
    return Decision(action, asks, exit_code=int(code))


def inputs_of_request(request: ControlRequest, rank: int, question: Question, now: float) -> dict[str, Any]:
    """Returns what a decision about a request is made of as JSON values; the arguments are those of `after_request`."""
    asked = {"rank": rank, "action": request.action, "description": request.description}
    return question.to_record(now) | {"request": asked}


def about_policy(settings: RestartSettings, nodes: int) -> list[str]:
    """Returns warnings about a policy that has no effect, or not the expected one, in a job of `nodes` nodes."""
    if settings.restart_policy != _MIN_HEALTHY:
        return []
    if nodes == 1:
        return ["--ft-restart-policy min-healthy does what any-failed does in a job of one node"]
    return [
        "--ft-restart-policy min-healthy helps only ranks that can go on without the others (an in-process wrapper,"
        " or no collectives): ranks that wait for a failed one hang"
    ]
