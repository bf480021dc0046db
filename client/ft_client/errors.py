"""The exception of the client. It is raised for misuse only."""

from __future__ import annotations

from rank_monitor.contract.errors import FtError


class RankMonitorClientError(FtError):
    """A call at the wrong time or with a wrong value. The training script must act; nothing was sent."""
