"""The classes of faults, by which the restart policy, the journal and the console name a cause. Pure; knows no rank.

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
    """A rank, or what it waits for, makes no progress."""

    HARDWARE = "hardware suspected"
    """The node or one of its devices: a restart on other hardware may succeed."""

    MEMORY = "memory"
    """Host, GPU or shared memory was too small."""

    PREEMPTION = "preemption"
    """A signal from outside the launcher ended the rank."""

    INFRASTRUCTURE = "infrastructure"
    """Network, storage, a service or a limit of the system: a later attempt may succeed."""

    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Cause:
    """The class of a fault, and the likely cause as text; the text is empty where the fault itself says enough."""

    fault_class: FaultClass = FaultClass.UNKNOWN
    hint: str = ""


NO_CAUSE = Cause()
