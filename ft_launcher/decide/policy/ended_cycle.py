"""What the restart policy remembers of a failed cycle: how long it ran, how far it came, which error counts. Pure.

`restart_policy.py` calls `ended_cycle` once for each fault and adds the result to its `History`. The history is part of
the contract, since the in-process wrapper keeps one by the same rules (`contract/restart_history.py`).
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass

from ft_launcher.decide.attribution import Fault, FaultClass
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.restart_history import EndedRun
from rank_monitor.contract.wire.messages import NO_ITERATION

YOUNG = 2.0
"""A factor of the longest wait of `--ft-backoff`: a cycle whose ranks ran for a shorter time died young, and the next
wait is doubled. Kubernetes' kubelet has the same factor."""

EARLY_S = 60.0
"""Seconds. A cycle that fails sooner and before any process group has trained nothing: the imports of a large program
and the check of its arguments take less."""
BRIEF_S = 600.0
"""Seconds. A cycle that fails sooner has hardly trained, so that its error counts even without an iteration. With the
default limit of three equal errors, half an hour is lost at most."""


@dataclass(frozen=True)
class CycleLife:
    """How long the ranks of a cycle ran and how far they came.

    Attributes:
        lived_s: seconds from the start of the ranks to the end of the cycle.
        iteration: the last iteration that the ranks reached; NO_ITERATION: none was reported; None: it is unknown.
        loaded_step: the step of the state in memory that the ranks went on from; 0: of none, but from the checkpoint on
            disk or from the beginning; None: they had not looked for one, or never do.
        loaded_series: of that state, which step and series name.
        step: how many steps the rank of the fault had done, by its own count for the state in memory; None: it kept
            none.
        last_step: the largest such count of the ranks of its node.
        saved_step: the newest step that the ranks of its node have saved in memory since they went on, whole on the
            node; 0: none.
    """

    lived_s: float = 0.0
    iteration: int | None = NO_ITERATION
    loaded_step: int | None = None
    loaded_series: str = ""
    step: int | None = None
    last_step: int = 0
    saved_step: int = 0


def ended_cycle(fault: Fault, life: CycleLife) -> EndedRun:
    """Returns what the history needs to know of a cycle that `fault` ended.

    The error counts as a repeated one under either condition:

    - The rank reported an iteration: the same error at the same iteration comes again.
    - The cycle was short (`BRIEF_S`) and a restart cannot mend the error (`_is_of_program`). After long work the same
      error may be a rare one that happens to come twice.
    """
    has_iteration = fault.iteration != NO_ITERATION
    error = ""
    if has_iteration or (life.lived_s < BRIEF_S and _is_of_program(fault)):
        error = fault.error
    relocates = fault.exit_code == ExitCode.RESUME_TO_DISAMBIGUATE
    return EndedRun(
        error,
        fault.error_text,
        fault.iteration,
        compares_text=not has_iteration,
        is_early=fault.before_group and not has_iteration and life.lived_s < EARLY_S,
        fault_class=fault.fault_class.value,
        lived_s=life.lived_s,
        reached=life.iteration,
        relocates=relocates,
        excuses_no_progress=relocates or fault.fault_class is FaultClass.PREEMPTION,
    )


def _is_of_program(fault: Fault) -> bool:
    """Returns whether the exception of a fault would be raised again on any node, at any time.

    The class `user error` is not enough: an OSError that the program itself raises has that class, although what the
    system says of a file may pass. FileNotFoundError counts: a missing file stays missing.
    """
    kind = getattr(builtins, fault.error.partition(" at ")[0], None)
    of_system = isinstance(kind, type) and issubclass(kind, OSError) and not issubclass(kind, FileNotFoundError)
    return fault.fault_class is FaultClass.USER_ERROR and not of_system
