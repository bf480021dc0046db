"""Faults on purpose, for drills: `inject_fault(kind, ...)` in a script, and what `--ft-inject` sets up in a rank.

The public names, loaded when they are used: importing this package loads none of its modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_client.rank.lazy_names import lazy_names

if TYPE_CHECKING:
    from ft_client.inject.drill import SimulatedFaultParams as SimulatedFaultParams
    from ft_client.inject.drill import inject_fault as inject_fault
    from ft_client.inject.drill import simulate_fault as simulate_fault
    from ft_client.inject.strikes import BaseFaultOnPurpose as BaseFaultOnPurpose
    from ft_client.inject.strikes import FaultOnPurpose as FaultOnPurpose

_HOMES = {
    "BaseFaultOnPurpose": ".strikes",
    "FaultOnPurpose": ".strikes",
    "SimulatedFaultParams": ".drill",
    "inject_fault": ".drill",
    "simulate_fault": ".drill",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
