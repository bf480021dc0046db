"""`nvidia_resiliency_ext.fault_tolerance.data`: the names of variables, and what a training reads or asks for."""

from ft_client.control import WorkloadAction, WorkloadControlRequest  # noqa: F401
from ft_client.rank.monitoring.learned_limits import HeartbeatTimeouts, SectionTimeouts  # noqa: F401
from rank_monitor.contract import env

FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR = FT_RANK_MONITOR_IPC_SOCKET = env.RANK_MONITOR_SOCKET
FT_LAUNCHER_IPC_SOCKET_ENV_VAR = FT_LAUNCHER_IPC_SOCKET = env.LAUNCHER_SOCKET
