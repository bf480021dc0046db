"""A first look at a failed cycle while some ranks still run: whether to take stacks, and whether to wait. Pure.

`agent/fault_finding.py` asks `outlook` before it stops the ranks. Stacks must be taken before the stop, since a rank
that has ended shows none; they take time, so they are taken only where the failure may be a hang. And the first error
seen may be a consequence whose cause is not reported yet: the agent then waits up to 3 s for the cause. Who failed
first, and why, `first_failure.py` finds once, after the stop.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ft_launcher.decide.attribution import first_failure, known_errors
from ft_launcher.decide.attribution.cycle_evidence import RankEvidence
from ft_launcher.decide.attribution.fault import FaultClass, FaultKind
from ft_launcher.decide.attribution.hints import NodeEvidence


@dataclass(frozen=True)
class Outlook:
    """What to do about a failed cycle before its ranks are stopped.

    Attributes:
        hangs: ranks may hang or hold up others: take stacks, which say more than exit codes.
        cause_may_come: wait a moment for another report. The first error may be the consequence of one that no rank has
            reported yet, or its own rank still runs and may add to it.
        lost_peer: the local rank that failed first, where its error only says that it lost another rank; None: the rank
            failed by itself, or none has failed.
        stood_still: `--ft-hang-timeout` has ended a hang, on this node or on another one. `fault_finding.look` adds it.
    """

    hangs: bool
    cause_may_come: bool
    lost_peer: int | None = None
    stood_still: bool = False


def outlook(ranks: Sequence[RankEvidence], running: Collection[int], suspected: Collection[int]) -> Outlook:
    """Returns what the ranks of a node show at this moment.

    Args:
        ranks: the evidence so far.
        running: local ranks whose process has not ended.
        suspected: local ranks that were about to exceed a limit of their own a moment ago.
    """
    first = first_failure.earliest(ranks)
    if first is None:  # no rank failed by itself: a restart in process failed, or the ranks are zombies
        return Outlook(hangs=True, cause_may_come=False)
    kind, is_loss = first.fault_kind, first.consequence_score == 1
    lost_peer = None
    if is_loss:
        lost_peer = first.local_rank
    # A verdict or a signal is a cause by itself; only an exception can be the consequence of another error.
    is_error = kind is FaultKind.EXCEPTION and first.exception is not None
    is_loss_value = first.exception is not None and first.exception.type == known_errors.BAD_LOSS
    cause_may_come = is_error and not is_loss_value and (is_loss or first.local_rank in running)
    hangs = (
        kind is FaultKind.HANG
        or first.signal_number == signal.SIGABRT  # NCCL's watchdog aborts
        or (is_loss and first.local_rank in suspected)  # what it lost may have been ended for a hang
        or first_failure.cause_of(first, ranks, NodeEvidence()).fault_class is FaultClass.HANG
    )
    return Outlook(hangs, cause_may_come, lost_peer)
