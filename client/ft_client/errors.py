"""What the client raises: misuse, and nothing else."""

from __future__ import annotations

from rank_monitor.contract.errors import FtError


class RankMonitorClientError(FtError):
    """The training script must act: a call came at the wrong time or with a wrong value. Nothing was sent."""
