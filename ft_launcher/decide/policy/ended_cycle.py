"""What the restart policy remembers of a failed cycle: how long it lived, how far it came, which error counts. Pure.

`restart_policy.py` adds the result to its `History`, which the contract shares with the in-process wrapper.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass

from ft_launcher.decide.attribution import Fault, FaultClass
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.restart_history import EndedRun
from rank_monitor.contract.wire.messages import NO_ITERATION

YOUNG = 2.0
"""A cycle died young when its ranks ran for less than this times the longest wait. Kubernetes' kubelet has the same
factor."""

EARLY_S = 60.0
"""A cycle that fails below this, before any process group, has trained nothing: imports of a large program and its
arguments take less."""
BRIEF_S = 600.0
"""A cycle that fails below this has hardly trained. With the default limit of three, half an hour is lost at most."""


@dataclass(frozen=True)
class CycleLife:
    """Seconds that a cycle's ranks ran, and their iteration: NO_ITERATION when none was reported, None if unknown."""

    lived_s: float = 0.0
    iteration: int | None = NO_ITERATION


def ended_cycle(fault: Fault, life: CycleLife) -> EndedRun:
    """Returns what the history needs to know of a cycle that `fault` ended.

    Without an iteration only an error that a restart cannot mend counts, and only where the cycle was short: after long
    work the same error may be a rare one that comes twice.
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
    """Whether the exception of a fault would be raised on any node, at any time.

    What the system says of files, but for one that is not there, may pass: an OSError that the program raises itself
    is of class `user error` too.
    """
    kind = getattr(builtins, fault.error.partition(" at ")[0], None)
    of_system = isinstance(kind, type) and issubclass(kind, OSError) and not issubclass(kind, FileNotFoundError)
    return fault.fault_class is FaultClass.USER_ERROR and not of_system
