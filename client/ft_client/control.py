"""The requests of a training to the launcher. `RankMonitorClient` sends them.

What follows a request is decided by the launcher, not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class WorkloadAction(Enum):
    """The request. The names are NVIDIA's; the values are those of `ControlRequest`."""

    Continue = "restart"
    """End this cycle and start the next one as usual."""
    ExcludeThisNode = "exclude_this_node"
    """Go on without this node."""
    ShutdownWorkload = "stop_job"
    """End the job; do not restart."""


@dataclass(frozen=True)
class WorkloadControlRequest:
    """An action with the reason for it, which goes to the log and the journal."""

    action: WorkloadAction
    description: str = ""
