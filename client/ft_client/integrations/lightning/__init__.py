"""Callbacks for Lightning: watch by heartbeats or sections, learned limits, finished flag, stragglers, state in memory.

    from ft_client.integrations.lightning import FaultToleranceSectionsCallback

    watch = FaultToleranceSectionsCallback(autoresume=True, calculate_timeouts=True, exp_dir="/results/run1")
    Trainer(callbacks=[watch], ...).fit(model)

A class is loaded when it is used: importing this package does not need Lightning. Names and arguments are those of
NVIDIA's callbacks for Lightning. docs/lightning.md is the user's guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_client.rank.lazy_names import lazy_names

if TYPE_CHECKING:
    from ft_client.inject import SimulatedFaultParams as SimulatedFaultParams
    from ft_client.integrations.lightning.callbacks import FaultToleranceCallback as FaultToleranceCallback
    from ft_client.integrations.lightning.callbacks import (
        FaultToleranceSectionsCallback as FaultToleranceSectionsCallback,
    )
    from ft_client.integrations.lightning.memory_state import MemoryCheckpoint as MemoryCheckpoint
    from ft_client.integrations.lightning.stragglers import StragglerDetectionCallback as StragglerDetectionCallback

_HOMES = {
    "FaultToleranceCallback": ".callbacks",
    "FaultToleranceSectionsCallback": ".callbacks",
    "MemoryCheckpoint": ".memory_state",
    "SimulatedFaultParams": "ft_client.inject",
    "StragglerDetectionCallback": ".stragglers",
}
"""Class -> the module it lives in."""

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
