"""Health of this node before a cycle: one check per file, each in a process of its own.

Nothing is loaded before it is asked for: a check's process imports its own file and the standard library only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ft_launcher.health.memory_reclaim import GpuMemory
    from ft_launcher.health.node_health import NodeHealth, check_node
    from ft_launcher.health.plan import Places
    from ft_launcher.health.reading import NodeVerdict, Reading, judge

__all__ = ["GpuMemory", "NodeHealth", "NodeVerdict", "Places", "Reading", "check_node", "judge"]

_FILE_OF = {"GpuMemory": "memory_reclaim", "NodeHealth": "node_health", "check_node": "node_health", "Places": "plan"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FILE_OF.get(name, 'reading')}"), name)
