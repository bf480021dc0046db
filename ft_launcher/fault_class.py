"""What kind of cause a fault has, as the restart policy, the journal and the console name it. Pure; knows no rank.

docs/restart_policy.md says what each class changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FaultClass(str, Enum):
    """Who has to act: on the program, on the node, on nothing."""

    USER_ERROR = "user error"
    """The program: it fails in the same way on any node."""

    HANG = "hang"
    """A rank, or what it waits for, does not come on."""

    HARDWARE = "hardware suspected"
    """The node or one of its devices: another one may do better."""

    MEMORY = "memory"
    """Host, GPU or shared memory was too small."""

    PREEMPTION = "preemption"
    """Somebody outside told the rank to end."""

    INFRASTRUCTURE = "infrastructure"
    """Network, storage, a service or a limit of the system: later it may do."""

    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Cause:
    """The class of a fault, and the likely cause in words; empty where the fault itself says it all."""

    fault_class: FaultClass = FaultClass.UNKNOWN
    hint: str = ""


NO_CAUSE = Cause()
