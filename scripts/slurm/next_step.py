"""What follows after an attempt at a training: how it ended in, one step with its reason out. Pure.

An attempt is one job of Slurm: a launcher per node, or ranks alone. Knows no Slurm and no file; `after_attempt.py`
reads what happened and writes down what follows, and the batch scripts carry it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rank_monitor.contract.exit_codes import ExitCode

TIME_LIMIT = "TimeLimit"
"""What Slurm calls it."""

MAX_MOVES = 3
"""So many exits with code 16 in a row are no failures, as in the launcher."""

_LEFT = (ExitCode.NODE_UNHEALTHY, ExitCode.NODE_EXCLUDED)
_PREEMPTED = (ExitCode.PREEMPTED, ExitCode.PREEMPTED_KILLED)
_NOT_MENDED = {
    int(ExitCode.BAD_CONFIG): "bad command line or configuration",
    int(ExitCode.FAILED_ON_RESULT_VALIDATION): "a result failed its validation",
    int(ExitCode.NOT_RESTARTABLE): "the same would happen again",
    int(ExitCode.JOB_STOPPED): "a rank asked for the end of the job",
    126: "the command cannot be executed",
    127: "the command was not found",
}


class Outcome(Enum):
    """How an attempt ended. The value stands in the history."""

    DONE = "done"
    PREEMPTED = "preempted"
    UNFINISHED = "unfinished"
    MOVED = "moved"
    FAILED = "failed"
    NOT_MENDED = "not to be mended"
    ENDED_BY_SLURM = "ended by Slurm"


class Action(Enum):
    """What the batch script does. LEAVE: nothing, since Slurm deals with the job already."""

    DONE = "done"
    NEXT = "next"
    STOP = "stop"
    LEAVE = "leave"


@dataclass(frozen=True)
class NodeEnd:
    """A node's launcher. `code`: None when it ended without a word; `in_doubt`: its hardware may be at fault.

    `not_restartable`: it found that a restart would not help, whichever exit code it has for that
    (`--ft-no-restart-exit-code`).
    """

    node: str
    code: int | None
    reason: str = ""
    in_doubt: bool = False
    not_restartable: bool = False


@dataclass(frozen=True)
class Attempt:
    """All that is known of an attempt.

    Args:
        ends: of the launchers; empty where ranks ran alone.
        code: srun's exit code, the highest of its tasks.
        flag: whether the training made its finished flag.
        told: whether the batch script told the training to end, before the time limit.
        ended_by: Slurm's reason, when it is Slurm that ends the job; "None" is one. Empty: it does not.
    """

    ends: tuple[NodeEnd, ...]
    code: int
    flag: bool
    told: bool = False
    ended_by: str = ""

    @property
    def codes(self) -> set[int]:
        """Exit codes of all nodes; srun's stands for those that ended without a word."""
        codes = {self.code if end.code is None else end.code for end in self.ends}
        return codes or {self.code}


@dataclass(frozen=True)
class Terms:
    """The user's: failures in a row that end the training; whether only the flag says that it is complete."""

    max_failures: int
    flag_required: bool = False


@dataclass(frozen=True)
class Step:
    """What follows, and why. `exclude`: nodes that the next job must do without; `exit_code`: the batch script's."""

    action: Action
    outcome: Outcome
    reason: str
    exclude: tuple[str, ...] = ()
    exit_code: int = 0


def decide(attempt: Attempt, history: Sequence[Outcome], terms: Terms) -> Step:
    """What follows after an attempt.

    Args:
        history: outcomes of the attempts before, the oldest first.
    """
    codes = attempt.codes
    if attempt.flag:
        return Step(Action.DONE, Outcome.DONE, "the training made its finished flag")
    if attempt.ended_by not in ("", TIME_LIMIT):
        return Step(Action.LEAVE, Outcome.ENDED_BY_SLURM, "Slurm ends this job: cancelled, requeued or preempted")
    found = _NOT_MENDED | {
        end.code: _NOT_MENDED[int(ExitCode.NOT_RESTARTABLE)] for end in attempt.ends if end.code and end.not_restartable
    }
    for code in sorted(codes & set(found)):
        reason = f"exit code {code}: {found[code]}{_words_of(attempt, code)}; another job would not mend that"
        return Step(Action.STOP, Outcome.NOT_MENDED, reason, exit_code=code)
    stayed = codes - set(_LEFT) or codes
    if stayed == {0} and not terms.flag_required:
        return Step(Action.DONE, Outcome.DONE, "all ranks ended with 0")
    if attempt.ended_by or attempt.told or codes & set(_PREEMPTED):
        reason = (
            "the time limit"
            if attempt.ended_by
            else "told to end before the time limit"
            if attempt.told
            else "preempted"
        )
        return Step(Action.NEXT, Outcome.PREEMPTED, f"{reason}, which is not a failure", _left(attempt))
    if stayed == {0}:
        return Step(
            Action.NEXT, Outcome.UNFINISHED, "all ranks ended with 0, without the finished flag", _left(attempt)
        )
    if ExitCode.RESUME_TO_DISAMBIGUATE in codes and (move := _in_a_row(history, Outcome.MOVED) + 1) <= MAX_MOVES:
        reason = f"exit code 16: move {move} of {MAX_MOVES} to other hardware, no failure"
        return Step(Action.NEXT, Outcome.MOVED, reason, _doubtful(attempt) + _left(attempt))
    return _after_failure(attempt, history, terms)


def _after_failure(attempt: Attempt, history: Sequence[Outcome], terms: Terms) -> Step:
    failures = _in_a_row([outcome for outcome in history if outcome is not Outcome.MOVED], Outcome.FAILED) + 1
    worst = max(attempt.codes)
    reason = (
        f"exit code {worst}{_words_of(attempt, worst)}; failure {failures} in a row, the limit is {terms.max_failures}"
    )
    if failures >= terms.max_failures:
        return Step(Action.STOP, Outcome.FAILED, reason, exit_code=worst)
    return Step(Action.NEXT, Outcome.FAILED, reason, _left(attempt) + _doubtful(attempt))


def _in_a_row(history: Sequence[Outcome], outcome: Outcome) -> int:
    """How many attempts at the end of the history ended like that."""
    return next((n for n, earlier in enumerate(reversed(history)) if earlier is not outcome), len(history))


def _left(attempt: Attempt) -> tuple[str, ...]:
    """Nodes that said of themselves that they are not fit."""
    return tuple(end.node for end in attempt.ends if end.code in _LEFT)


def _doubtful(attempt: Attempt) -> tuple[str, ...]:
    return tuple(end.node for end in attempt.ends if end.in_doubt)


def _words_of(attempt: Attempt, code: int) -> str:
    """What a launcher that ended with `code` said, with its node."""
    end = next((end for end in attempt.ends if end.code == code and end.reason), None)
    return f" ({end.node}: {end.reason})" if end else ""
