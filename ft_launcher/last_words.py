"""Gives the rank that the others lost a moment to say why, before all are stopped. It acts; `attribution` decides.

A rank that cleans up after an error - a `finally` that destroys the process group, say - closes its connections first:
its peers fail before it has said a word, and the stop would be the end of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ft_launcher.attribution import FaultKind, NodeEvidence
from ft_launcher.evidence import fault_in, gather
from ft_launcher.monitors import NodeMonitors
from ft_launcher.rank_context import RankContext
from rank_monitor.contract.wait import readable

PATIENCE_S = 3.0


def await_cause(
    workers: Sequence[Any], ranks: RankContext, monitors: NodeMonitors, told: int, hear: Callable[[], None]
) -> None:
    """Waits while all that failed only lost a peer, and until who did not has ended, for `PATIENCE_S` at most.

    Args:
        workers: torch's, in the order of local ranks.
        told: readable when a signal came to the launcher, which ends the wait.
        hear: takes what the monitors say.
    """
    deadline = time.monotonic() + PATIENCE_S
    while ranks.pidfds and _is_unsaid(workers, ranks, monitors) and (left := deadline - time.monotonic()) > 0:
        if told in readable([*ranks.pidfds.values(), *monitors.descriptors(), told], left):
            return
        ranks.reap_all()
        hear()


def _is_unsaid(workers: Sequence[Any], ranks: RankContext, monitors: NodeMonitors) -> bool:
    """Whether the error that is the cause may be still to come, or is not printed yet."""
    fault = fault_in(gather(workers, ranks, monitors), NodeEvidence(), all_ranks=False)
    if fault is None or fault.kind is not FaultKind.EXCEPTION:
        return False
    return fault.collateral or fault.local_rank in ranks.pidfds
