"""Faults of ranks that agreed to exit because of a suspect result: names its rank and device. Pure.

`first_failure.py` asks it about a failed cycle, `policy/restart_policy.py` for the text. Whether the result is
wrong is decided in the ranks (`ft_client.rerun`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ft_launcher.attribution.fault import Fault, FaultKind
from ft_launcher.attribution.rank_evidence import RankEvidence
from rank_monitor.contract.exit_codes import AGREED
from rank_monitor.contract.wire.messages import ResultInDoubt

_PERSISTENT = "persistent_error"


def about_suspect_result(fault: Fault, ranks: Sequence[RankEvidence], results: Mapping[int, ResultInDoubt]) -> Fault:
    """Returns the fault of ranks that agreed to exit: about the rank with the suspect result, whichever ended first.

    Args:
        fault: of the rank that ended first; unchanged where the ranks did not agree, or reported no suspect result.
        ranks: evidence of every local rank.
        results: suspect results by local rank.
    """
    if fault.exit_code not in AGREED or not results:
        return fault
    local_rank, result = min(results.items())
    rank = next(rank for rank in ranks if rank.local_rank == local_rank)
    what = f"exited with code {fault.exit_code}: {describe(result)}"
    mine = {"rank": rank.rank, "local_rank": local_rank, "pid": rank.pid, "iteration": result.iteration, "where": ""}
    return replace(fault, kind=FaultKind.EXIT, what=what, doubt=result, detail=(), hint="", collateral=False, **mine)  # type: ignore[arg-type]


def describe(result: ResultInDoubt) -> str:
    """Describes which device is suspected, and of what."""
    place, step = f"node {result.node}, device {result.device}", f"iteration {result.iteration} of rank {result.rank}"
    if result.finding == _PERSISTENT:
        return f"{place} computed {step} wrongly; another device did not"
    return f"{step} came out unexpected again on {place}; another device has to compute it"
