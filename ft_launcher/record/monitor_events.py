"""What the monitor of a rank reports to the launcher's parts: the types of these messages. Pure.

`ranks/monitors.py` returns them; the agent acts on them, and `recorder.py` writes them down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rank_monitor.contract.wire.launcher_messages import Fenced, Suspected, Verdict
from rank_monitor.contract.wire.messages import (
    ControlRequest,
    GroupMade,
    InterruptedAgain,
    LimitsSet,
    RankException,
    Restarter,
    ResultInDoubt,
    SectionTimes,
)

STALL = "stall"
"""The limit that only warns. A verdict of another limit that does not condemn asks for a restart in process."""


@dataclass(frozen=True)
class Replaced:
    """A monitor was lost and another took its place."""

    local_rank: int
    why: str


MonitorEvent: TypeAlias = (
    Verdict
    | RankException
    | ControlRequest
    | LimitsSet
    | InterruptedAgain
    | Restarter
    | SectionTimes
    | ResultInDoubt
    | GroupMade
    | Fenced
    | Suspected
    | Replaced
)
