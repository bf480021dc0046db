"""What interrupted an iteration, and on which rank, as it is written to the store. Pure."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.json_record import from_json


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
        """One JSON object."""
        return json.dumps({"rank": self.rank, "interruption": self.interruption.name})

    @classmethod
    def from_json(cls, text: str | bytes) -> InterruptionRecord:
        """The record that was written as `text`.

        Raises:
            ProtocolError: it is no such record.
        """
        try:
            written = from_json(_Written, json.loads(text))
            if written.rank < 0:
                raise ProtocolError(f"InterruptionRecord: rank {written.rank} is below 0")
            return cls(written.rank, Interruption[written.interruption])
        except KeyError as unknown:
            raise ProtocolError(f"InterruptionRecord: no interruption is named {unknown}") from None
        except ValueError as problem:
            raise ProtocolError(f"InterruptionRecord: no JSON: {problem}") from None


@dataclass(frozen=True)
class _Written:
    rank: int
    interruption: str
