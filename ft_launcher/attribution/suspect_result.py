"""Faults of ranks that agreed to exit because of a suspect result: names its rank and device. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ft_launcher.attribution import Fault, FaultKind, RankEvidence
from rank_monitor.contract.exit_codes import AGREED
from rank_monitor.contract.wire.messages import ResultInDoubt

_PERSISTENT = "persistent_error"


def about_doubt(fault: Fault, ranks: Sequence[RankEvidence], doubts: Mapping[int, ResultInDoubt]) -> Fault:
    """Returns the fault of ranks that agreed to exit: about the rank with the suspect result, whichever ended first.

    Args:
        fault: of the rank that ended first; unchanged where the ranks did not agree, or reported no suspect result.
        ranks: evidence of every local rank.
        doubts: suspect results by local rank.
    """
    if fault.exit_code not in AGREED or not doubts:
        return fault
    local_rank, doubt = min(doubts.items())
    it = next(rank for rank in ranks if rank.local_rank == local_rank)
    what = f"exited with code {fault.exit_code}: {words(doubt)}"
    mine = {"rank": it.rank, "local_rank": local_rank, "pid": it.pid, "iteration": doubt.iteration, "where": ""}
    return replace(fault, kind=FaultKind.EXIT, what=what, doubt=doubt, detail=(), hint="", collateral=False, **mine)  # type: ignore[arg-type]


def words(doubt: ResultInDoubt) -> str:
    """Describes which device is suspected, and of what."""
    place, step = f"node {doubt.node}, device {doubt.device}", f"iteration {doubt.iteration} of rank {doubt.rank}"
    if doubt.finding == _PERSISTENT:
        return f"{place} computed {step} wrongly; another device did not"
    return f"{step} came out unexpected again on {place}; another device has to compute it"
