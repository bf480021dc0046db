"""Callbacks for Lightning: watch by heartbeats or sections, learned limits, finished flag, stragglers.

`from ft_client.integrations.lightning import FaultToleranceCallback`. Loaded when used: only that needs Lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft_client.inject import SimulatedFaultParams
    from ft_client.integrations.lightning.heartbeats import FaultToleranceCallback
    from ft_client.integrations.lightning.sections import FaultToleranceSectionsCallback
    from ft_client.integrations.lightning.stragglers import StragglerDetectionCallback

_HOMES = {
    "FaultToleranceCallback": "ft_client.integrations.lightning.heartbeats",
    "FaultToleranceSectionsCallback": "ft_client.integrations.lightning.sections",
    "SimulatedFaultParams": "ft_client.inject",
    "StragglerDetectionCallback": "ft_client.integrations.lightning.stragglers",
}
"""Class -> the module it lives in."""

__all__ = [
    "FaultToleranceCallback",
    "FaultToleranceSectionsCallback",
    "SimulatedFaultParams",
    "StragglerDetectionCallback",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
