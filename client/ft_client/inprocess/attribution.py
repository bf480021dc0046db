"""The record of what interrupted an iteration, and on which rank, as written to the store. Pure.

The wrapper of a rank writes it, or its companion where the rank is dead. Which rank failed first is decided by the
launcher's `attribution/`, not here.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass

from rank_monitor.contract.iterations.escalation import COLLATERAL


class Interruption(enum.Enum):
    """Why an iteration ends before its function does."""

    EXCEPTION = enum.auto()
    """The function, a callback before it, or a health check raised an `Exception`."""
    BASE_EXCEPTION = enum.auto()
    """The function raised another `BaseException`: this rank ends."""
    SOFT_TIMEOUT = enum.auto()
    """No progress: the main thread was to be interrupted."""
    HARD_TIMEOUT = enum.auto()
    """No progress still: the process was to be killed."""
    TERMINATED = enum.auto()
    """The process has ended."""
    UNRESPONSIVE = enum.auto()
    """Its heartbeat stopped."""
    MONITOR_PROCESS_EXCEPTION = enum.auto()
    """Its monitor process failed."""
    JOINING = enum.auto()
    """No fault: it was started again, and is to take part at once."""


@dataclass(frozen=True)
class InterruptionRecord:
    """One rank, by its number in the iteration, and what happened there.

    Attributes:
        member: its number at entry, if the writer knows it.
        error: of an exception: its type, where it was raised, and in which iteration of the training.
        is_collateral: it is the consequence of a fault elsewhere.
    """

    rank: int
    interruption: Interruption
    member: int | None = None
    error: str = ""
    is_collateral: bool = False

    def to_json(self) -> str:
        """One JSON object, which the node agent writes into its journal."""
        known: dict[str, object] = {"rank": self.rank, "interruption": self.interruption.name}
        if self.member is not None:
            known["member"] = self.member
        if self.error:
            known["error"] = self.error
        if self.is_collateral:
            known[COLLATERAL] = True
        return json.dumps(known)
