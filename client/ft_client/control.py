"""The requests of a training to the launcher. `RankMonitorClient.send_workload_control_request` sends them.

What follows a request is decided by the launcher, not here. The names are NVIDIA's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class WorkloadAction(Enum):
    """What is asked for. The values are those of the message `ControlRequest`."""

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
