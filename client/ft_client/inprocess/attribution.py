"""What interrupted an iteration, and on which rank, as it is written to the store. Pure."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass


class Interruption(enum.Enum):
    """Why an iteration ends before its function does."""

    EXCEPTION = enum.auto()
    """The function, a callback before it, or a health check raised an `Exception`."""
    BASE_EXCEPTION = enum.auto()
    """It raised another `BaseException`: this rank ends."""
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


@dataclass(frozen=True)
class InterruptionRecord:
    """One rank, by its number in the iteration, and what happened there."""

    rank: int
    interruption: Interruption

    def to_json(self) -> str:
        """One JSON object, which the node agent writes into its journal."""
        return json.dumps({"rank": self.rank, "interruption": self.interruption.name})
