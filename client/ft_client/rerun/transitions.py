"""Decides the next state of a step and what to do, from its state and the votes of all ranks. Pure.

`state_machine.py` asks after each run of a step's body. A step is computed once, as a rule. When a check of any rank
rejects a result, all ranks compute the step once more on the same devices. A result that does not come again was a
transient error, and training goes on. A result that comes again is either correct, however odd, or the work of a broken
device: another device has to tell. So the ranks save a checkpoint from before the step and exit with code 16; the
launcher starts the job on other hardware, which computes the step from the checkpoint. The same result there means that
it was correct; another one means that the first device is broken, and the job ends with code 17.

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

This file knows nothing of results, groups, random numbers or data. `validation.py` makes a rank's votes, and
`state_machine.py` reduces the votes of all ranks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from rank_monitor.contract.exit_codes import ExitCode

EXIT_CODE_RESUME_TO_DISAMBIGUATE = int(ExitCode.RESUME_TO_DISAMBIGUATE)
EXIT_CODE_FAILED_ON_RESULT_VALIDATION = int(ExitCode.FAILED_ON_RESULT_VALIDATION)


class RerunMode(str, enum.Enum):
    """What the machine is for. The names are Megatron-LM's."""

    DISABLED = "disabled"
    """A step is computed once; a fatal unexpected result raises."""
    VALIDATE_RESULTS = "validate_results"
    """A step with an unexpected result is computed again."""
    REPORT_STATS = "report_stats"
    """Every step is computed twice, to tell how far the results of one and the same step vary."""
    REPORT_DETERMINISM_STATS = "report_stats"
    """Another name of REPORT_STATS, whose value may be given as `report_determinism_stats`, too."""

    @classmethod
    def _missing_(cls, value: object) -> RerunMode | None:
        if value == "report_determinism_stats":
            return cls.REPORT_STATS
        return None


class RerunState(enum.Enum):
    """Where a step is. The values are in checkpoints."""

    NOT_RUNNING_YET = "not_running_yet"
    """Between two steps."""
    INITIAL_RUN = "initial_run"
    """The step is computed for the first time."""
    RERUNNING_IN_PLACE = "rerunning_in_place"
    """The step is computed again on the same devices."""
    WILL_RERUN_FROM_CHECKPOINT = "will_rerun_from_checkpoint"
    """The job exits with code 16; or, after the checkpoint was loaded, has not begun the step in doubt yet."""
    RERUNNING_FROM_CHECKPOINT = "rerunning_from_checkpoint"
    """A resumed job computes the step in doubt."""
    RESTARTING_AGAIN = "restarting_again"
    """The resumed job found itself on the device in doubt: it exits with code 16 once more."""


COMPUTING = frozenset({RerunState.INITIAL_RUN, RerunState.RERUNNING_IN_PLACE, RerunState.RERUNNING_FROM_CHECKPOINT})
"""States in which the step's body runs; they end with a vote."""
RERUNNING = COMPUTING - {RerunState.INITIAL_RUN}
"""States in which the body runs once more."""
IN_DOUBT = frozenset({RerunState.WILL_RERUN_FROM_CHECKPOINT, RerunState.RESTARTING_AGAIN})
"""States whose checkpoint makes the next job compute the step again."""


class Votes(NamedTuple):
    """What a rank asks for at the end of a run. Of all ranks together: what any of them asked for.

    Attributes:
        rerun: compute the step again, in place: a result is unexpected.
        checkpoint: save and move the job: the same unexpected result came again.
        restart_again: move the job once more: this is the device in doubt.
        failed: stop the job: a device gave a wrong result.
    """

    rerun: bool = False
    checkpoint: bool = False
    restart_again: bool = False
    failed: bool = False


NO_VOTES = Votes()


class RerunAction(enum.Enum):
    """What a transition asks of `RerunStateMachine`, in its order."""

    RESUME = enum.auto()
    """Restore data and random numbers from a loaded checkpoint, if there is one."""
    BEGIN = enum.auto()
    """Begin a new step: count it, and drop what was found in the last one."""
    SAVE = enum.auto()
    """Save the state of random numbers, and the user's state."""
    RESTORE = enum.auto()
    """Restore what SAVE has saved."""
    REWIND = enum.auto()
    """Have the data iterators give the microbatches of this step once more."""
    ADVANCE = enum.auto()
    """Have the data iterators drop the microbatches of this step: it is done."""
    REPORT = enum.auto()
    """Count this rerun, and log now and then how far results vary."""


@dataclass(frozen=True)
class Transition:
    """What follows a run of a step.

    Attributes:
        state: the next state.
        run: whether the step's body runs in it.
        actions: what to do before, in this order.
        reason: why, for the log; empty: nothing unusual.
    """

    state: RerunState
    run: bool
    actions: tuple[RerunAction, ...] = ()
    reason: str = ""


def votes_count(state: RerunState, mode: RerunMode) -> bool:
    """Returns whether the ranks have to agree before `transition`. The same on every rank."""
    return mode is RerunMode.VALIDATE_RESULTS and state in COMPUTING


def transition(state: RerunState, mode: RerunMode, votes: Votes) -> Transition:
    """Returns what to do when a rank asks whether to run the step's body (again).

    Args:
        state: where the step is.
        mode: what the machine is for.
        votes: what any rank asked for in the run that has ended. They count only where `votes_count` says so.
    """
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
