"""Decides the next state of a step and what to do, from its state and the votes of all ranks. Pure.

    NOT_RUNNING_YET --run--> INITIAL_RUN --no vote--> NOT_RUNNING_YET
                                |  vote: rerun
                                v
                         RERUNNING_IN_PLACE --no vote--> NOT_RUNNING_YET
                                |  vote: checkpoint
                                v
                      WILL_RERUN_FROM_CHECKPOINT        exit 16; a job on other hardware loads the checkpoint
                                |  run
                                v
                      RERUNNING_FROM_CHECKPOINT --no vote--> NOT_RUNNING_YET
                         |                 |  vote: failed
            vote: restart again            +--> stays: exit 17
                         v
                  RESTARTING_AGAIN                      exit 16 again, from the same checkpoint

Knows nothing of results, groups, random numbers or data: who votes, and how the votes are reduced, live elsewhere.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from rank_monitor.contract.exit_codes import ExitCode

EXIT_CODE_RESUME_TO_DISAMBIGUATE = int(ExitCode.RESUME_TO_DISAMBIGUATE)
EXIT_CODE_FAILED_ON_RESULT_VALIDATION = int(ExitCode.FAILED_ON_RESULT_VALIDATION)


class RerunMode(str, enum.Enum):
    """What the machine is for."""

    DISABLED = "disabled"
    """A step is computed once; a fatal unexpected result raises."""
    VALIDATE_RESULTS = "validate_results"
    """A step with an unexpected result is computed again."""
    REPORT_STATS = "report_stats"
    """Every step is computed twice, to tell how far results vary. Also `report_determinism_stats`."""
    REPORT_DETERMINISM_STATS = "report_stats"

    @classmethod
    def _missing_(cls, value: object) -> RerunMode | None:
        if value == "report_determinism_stats":
            return cls.REPORT_STATS
        return None


class RerunState(enum.Enum):
    """Where a step is."""

    NOT_RUNNING_YET = "not_running_yet"
    INITIAL_RUN = "initial_run"
    RERUNNING_IN_PLACE = "rerunning_in_place"
    WILL_RERUN_FROM_CHECKPOINT = "will_rerun_from_checkpoint"
    RERUNNING_FROM_CHECKPOINT = "rerunning_from_checkpoint"
    RESTARTING_AGAIN = "restarting_again"


COMPUTING = frozenset({RerunState.INITIAL_RUN, RerunState.RERUNNING_IN_PLACE, RerunState.RERUNNING_FROM_CHECKPOINT})
"""States in which the step's body runs; they end with a vote."""
RERUNNING = COMPUTING - {RerunState.INITIAL_RUN}
"""States in which the body runs once more."""
IN_DOUBT = frozenset({RerunState.WILL_RERUN_FROM_CHECKPOINT, RerunState.RESTARTING_AGAIN})
"""States whose checkpoint makes the next job compute the step again."""


class Votes(NamedTuple):
    """What a rank asks for at the end of a run; of all ranks together, what any of them asked for."""

    rerun: bool = False
    checkpoint: bool = False
    restart_again: bool = False
    failed: bool = False


NO_VOTES = Votes()


class RerunAction(enum.Enum):
    """What a transition asks of the actor, in its order."""

    RESUME = enum.auto()
    """Take over data and random numbers of a loaded checkpoint, if there is one."""
    BEGIN = enum.auto()
    """A new step: count it, forget the last one."""
    SAVE = enum.auto()
    """Keep the state of random numbers and of the user."""
    RESTORE = enum.auto()
    """Go back to what was kept."""
    REWIND = enum.auto()
    """The data of this step come once more."""
    ADVANCE = enum.auto()
    """The data of this step are done with."""
    REPORT = enum.auto()
    """Count this rerun, and tell now and then how far results vary."""


@dataclass(frozen=True)
class Transition:
    """The next state, whether the step's body runs in it, what to do before, and why (empty: nothing unusual)."""

    state: RerunState
    run: bool
    actions: tuple[RerunAction, ...] = ()
    reason: str = ""


def votes_count(state: RerunState, mode: RerunMode) -> bool:
    """Returns whether the ranks have to agree before `transition`. The same on every rank."""
    return mode is RerunMode.VALIDATE_RESULTS and state in COMPUTING


def transition(state: RerunState, mode: RerunMode, votes: Votes) -> Transition:
    """Returns what to do when a rank asks whether to run (again); `votes` are of all ranks, where they count."""
    if not votes_count(state, mode):
        votes = NO_VOTES
    match state:
        case RerunState.NOT_RUNNING_YET:
            actions = [RerunAction.RESUME, RerunAction.BEGIN]
            if mode is not RerunMode.DISABLED:
                actions.append(RerunAction.SAVE)
            return Transition(RerunState.INITIAL_RUN, True, tuple(actions))
        case RerunState.INITIAL_RUN:
            if votes.rerun:
                reason = "a rank has an unexpected result: all ranks compute the step again"
            else:
                reason = ""
            if votes.rerun or mode is RerunMode.REPORT_STATS:
                return Transition(
                    RerunState.RERUNNING_IN_PLACE, True, (RerunAction.RESTORE, RerunAction.REWIND), reason
                )
        case RerunState.RERUNNING_IN_PLACE:
            if votes.checkpoint:
                reason = "a rank has the same unexpected result again: another device has to compute the step"
                back = (RerunAction.RESTORE, RerunAction.REWIND)
                return Transition(RerunState.WILL_RERUN_FROM_CHECKPOINT, False, back, reason)
            if mode is RerunMode.REPORT_STATS:
                return Transition(RerunState.NOT_RUNNING_YET, False, (RerunAction.ADVANCE, RerunAction.REPORT))
        case RerunState.WILL_RERUN_FROM_CHECKPOINT:
            reason = "the step in doubt is computed again"
            return Transition(
                RerunState.RERUNNING_FROM_CHECKPOINT, True, (RerunAction.RESUME, RerunAction.SAVE), reason
            )
        case RerunState.RERUNNING_FROM_CHECKPOINT:
            if votes.restart_again:
                reason = "a rank in doubt is on the same device as before: the job has to move"
                return Transition(RerunState.RESTARTING_AGAIN, False, reason=reason)
            if votes.failed:
                reason = "a device gave a wrong result twice: the job stops"
                return Transition(state, False, (RerunAction.RESTORE, RerunAction.REWIND), reason)
        case RerunState.RESTARTING_AGAIN:
            return Transition(state, False)
    return Transition(RerunState.NOT_RUNNING_YET, False, (RerunAction.ADVANCE,))


def ending(state: RerunState) -> tuple[bool, bool, int]:
    """Returns, after the last run of a step, whether to save a checkpoint, whether to exit, and with which code.

    The checkpoint of code 17 says that the step is not in doubt any more, so the job that loads it computes it once.
    """
    match state:
        case RerunState.WILL_RERUN_FROM_CHECKPOINT:
            return True, True, EXIT_CODE_RESUME_TO_DISAMBIGUATE
        case RerunState.RESTARTING_AGAIN:
            return False, True, EXIT_CODE_RESUME_TO_DISAMBIGUATE
        case RerunState.RERUNNING_FROM_CHECKPOINT:
            return True, True, EXIT_CODE_FAILED_ON_RESULT_VALIDATION
    return False, False, int(ExitCode.OK)
