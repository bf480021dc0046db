"""Faults on purpose: `inject_fault(kind, ...)` in a script, and what `--ft-inject` sets up in a rank.

    from ft_client.inject import inject_fault

    inject_fault("sleep", delay_s=60, rank=3)      # in a minute rank 3 hangs

A fault is reported on the console and to the launcher before it happens, so that the journal shows which faults were
injected. The public names are here, and are loaded when they are used: importing this package loads none of its
modules. docs/faults_on_purpose.md is the user's guide; `contract/settings/injection.py` has the grammar of a fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_client.rank.lazy_names import lazy_names

if TYPE_CHECKING:
    from ft_client.inject.injected_fault import BaseFaultOnPurpose as BaseFaultOnPurpose
    from ft_client.inject.injected_fault import FaultOnPurpose as FaultOnPurpose
    from ft_client.inject.requested_faults import SimulatedFaultParams as SimulatedFaultParams
    from ft_client.inject.requested_faults import inject_fault as inject_fault
    from ft_client.inject.requested_faults import simulate_fault as simulate_fault

_HOMES = {
    "BaseFaultOnPurpose": ".injected_fault",
    "FaultOnPurpose": ".injected_fault",
    "SimulatedFaultParams": ".requested_faults",
    "inject_fault": ".requested_faults",
    "simulate_fault": ".requested_faults",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
