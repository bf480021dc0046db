"""`nvidia_resiliency_ext.fault_tolerance.rank_monitor_server`."""

from ft_client.integrations.nvrx_alias.rank_monitor_server import RankMonitorServer

__all__ = ["RankMonitorServer"]
