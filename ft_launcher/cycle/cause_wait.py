"""Waits, before all ranks are stopped, for the error of the rank whose peers have lost it.

Called by the node agent; `attribution` decides which error is a consequence. A rank that cleans up after an error, in a
`finally` that destroys the process group for example, closes its connections first: its peers fail before it has
reported its error, and a stop would end it before it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ft_launcher.attribution import FaultKind, NodeEvidence
from ft_launcher.cycle.evidence import fault_in, gather
from ft_launcher.ranks.monitors import NodeMonitors
from ft_launcher.ranks.rank_context import RankContext
from rank_monitor.contract.processes.wait import readable

# Seconds that a restart is delayed at most, for a rank that takes this long to clean up after its error.
PATIENCE_S = 3.0


def await_cause(
    workers: Sequence[Any], ranks: RankContext, monitors: NodeMonitors, told: int, hear: Callable[[], object]
) -> None:
    """Waits until a rank has failed for a reason of its own and has ended, for `PATIENCE_S` seconds at most.

    Args:
        workers: torch's, in the order of local ranks.
        told: a descriptor, readable when the launcher got a signal, which ends the wait.
        hear: takes the monitors' messages.
    """
    deadline = time.monotonic() + PATIENCE_S
    while ranks.pidfds and _is_unsaid(workers, ranks, monitors) and (left := deadline - time.monotonic()) > 0:
        if told in readable([*ranks.pidfds.values(), *monitors.descriptors(), told], left):
            return
        ranks.reap_all()
        hear()


def _is_unsaid(workers: Sequence[Any], ranks: RankContext, monitors: NodeMonitors) -> bool:
    """Whether the error that is the cause may still be missing, or its rank has not ended and printed it."""
    fault = fault_in(gather(workers, ranks, monitors), NodeEvidence(), all_ranks=False)
    # A verdict or a signal is a cause by itself; only an exception can be the consequence of another error.
    if fault is None or fault.kind is not FaultKind.EXCEPTION:
        return False
    return fault.collateral or fault.local_rank in ranks.pidfds
