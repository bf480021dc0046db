"""`nvidia_resiliency_ext.fault_tolerance`: our client, with a configuration and a server for the peer's names."""

from ft_client.control import WorkloadAction, WorkloadControlRequest
from ft_client.errors import RankMonitorClientError
from ft_client.integrations.nvrx_alias.config import FaultToleranceConfig
from ft_client.integrations.nvrx_alias.rank_monitor_server import RankMonitorServer
from ft_client.rank_monitor_client import RankMonitorClient

__all__ = [
    "FaultToleranceConfig",
    "RankMonitorClient",
    "RankMonitorClientError",
    "RankMonitorServer",
    "WorkloadAction",
    "WorkloadControlRequest",
]
