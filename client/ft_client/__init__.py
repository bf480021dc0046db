"""A training seen from the inside: `import ft_client as ft`; `ft.init()`, `ft.section(name)`, `ft.steps(loader)`.

The whole public API, loaded when it is used: importing this package loads none of its rooms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_client.rank.lazy_names import lazy_names

if TYPE_CHECKING:
    from ft_client.control import WorkloadAction as WorkloadAction
    from ft_client.control import WorkloadControlRequest as WorkloadControlRequest
    from ft_client.errors import RankMonitorClientError as RankMonitorClientError
    from ft_client.memory.latest_folder import latest_memory_folder as latest_memory_folder
    from ft_client.memory.memory_checkpoint import MemoryCheckpoint as MemoryCheckpoint
    from ft_client.memory.memory_folders import memory_folder as memory_folder
    from ft_client.rank_monitor_client import RankMonitorClient as RankMonitorClient
    from ft_client.short_forms import init as init
    from ft_client.short_forms import monitored as monitored
    from ft_client.short_forms import report_iteration as report_iteration
    from ft_client.short_forms import section as section
    from ft_client.short_forms import should_save as should_save
    from ft_client.short_forms import shutdown as shutdown
    from ft_client.short_forms import steps as steps

_HOMES = {
    "MemoryCheckpoint": ".memory.memory_checkpoint",
    "RankMonitorClient": ".rank_monitor_client",
    "RankMonitorClientError": ".errors",
    "WorkloadAction": ".control",
    "WorkloadControlRequest": ".control",
    "init": ".short_forms",
    "latest_memory_folder": ".memory.latest_folder",
    "memory_folder": ".memory.memory_folders",
    "monitored": ".short_forms",
    "report_iteration": ".short_forms",
    "section": ".short_forms",
    "should_save": ".short_forms",
    "shutdown": ".short_forms",
    "steps": ".short_forms",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
