"""Faults on purpose, for drills: `inject_fault(kind, ...)` in a script, and what `--ft-inject` sets up in a rank.

The public names, loaded when they are used: importing this package imports nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft_client.inject.call import inject_fault
    from ft_client.inject.simulated import SimulatedFaultParams, simulate_fault
    from ft_client.inject.strikes import BaseFaultOnPurpose, FaultOnPurpose

__all__ = ["BaseFaultOnPurpose", "FaultOnPurpose", "SimulatedFaultParams", "inject_fault", "simulate_fault"]

_HOMES = {
    "BaseFaultOnPurpose": "strikes",
    "FaultOnPurpose": "strikes",
    "SimulatedFaultParams": "simulated",
    "inject_fault": "call",
    "simulate_fault": "simulated",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
