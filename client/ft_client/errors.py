"""The exception that `RankMonitorClient` and its callbacks raise, for misuse only: a fault of a monitor raises
nothing."""

from __future__ import annotations

from rank_monitor.contract.errors import FtError


class RankMonitorClientError(FtError):
    """A call at the wrong time or with a wrong value. The training script must act; nothing was sent."""
