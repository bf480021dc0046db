"""Finds who holds up the ranks of all nodes at a hang, by what each node saw of its own ranks. Pure.

One node alone sees ranks that wait, and not for whom: the culprit mostly runs elsewhere. So each node sends `to_record`
with its arrival after the hang. The coordinator reads the records (`of_records`) and asks `find_culprits`, by
`decide/policy/job_policy.py`. Before a restart in process the node that hosts the ranks' store does the same
(`agent/in_process/culprit_exchange.py`), and `ft_launcher replay` does it with the journals of the nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_launcher.decide.attribution import collective, first_failure, nccl_view, rank_view
from ft_launcher.decide.attribution.cycle_evidence import RankEvidence
from ft_launcher.decide.attribution.fault import HangFinding
from ft_launcher.decide.attribution.nccl_view import NcclView
from ft_launcher.decide.attribution.rank_view import RankView
from rank_monitor.contract.errors import ProtocolError


@dataclass(frozen=True)
class NodeScene:
    """What one node saw of its ranks.

    Attributes:
        name: the name of the node, for texts.
        views: one view for each of its ranks.
        pids: global rank -> pid of its process; 0: not known. NCCL names processes by pid.
        nccl: what NCCL's RAS told this node about all ranks of the job; None: nothing, or it was not asked.
    """

    name: str
    views: Sequence[RankView]
    pids: Mapping[int, int]
    nccl: NcclView | None = None


def to_record(
    ranks: Sequence[RankEvidence], stop_began: float | None, hung: bool, nccl: NcclView | None
) -> dict[str, Any]:
    """Returns what a node tells the coordinator about its ranks after a fault, for `JoinRequest.views`.

    Args:
        ranks: the evidence of this node's ranks.
        stop_began: when the launcher began to stop the ranks (monotonic seconds); None: it has not.
        hung: the cycle ended by a hang. Only then the record has views of the ranks, 1 KB each.
        nccl: what NCCL's RAS says of the ranks of the job; None: nothing.
    """
    seen: dict[str, Any] = {}
    if hung:
        views = zip(rank_view.views(ranks, stop_began), ranks, strict=True)
        seen["ranks"] = [rank_view.to_record(view) | {"pid": rank.pid} for view, rank in views]
        if nccl is not None:
            seen["nccl"] = nccl_view.to_record(nccl)
    returned = list(first_failure.returned(ranks, stop_began).items())
    if returned:  # two are enough: with more than one nobody is named (`first_failure.with_returned`)
        seen["returned"] = {str(rank): round(ago_s, 3) for rank, ago_s in returned[:2]}
    return seen


def of_records(name: str, ranks: Sequence[Any], nccl: Any) -> NodeScene:
    """Returns what a node sent about its ranks. An answer of NCCL that cannot be read is left out: it only adds detail.

    Args:
        name: the name of the node, for texts.
        ranks: records of `rank_view.to_record`, each with the `pid` of the rank.
        nccl: a record of `nccl_view.to_record`, or None.

    Raises:
        ProtocolError: the records of the ranks cannot be read.
    """
    views = [rank_view.of_record(record) for record in ranks]
    pids = {view.rank: record.get("pid") for view, record in zip(views, ranks, strict=True)}
    answer = None
    with contextlib.suppress(ProtocolError):
        if nccl is not None:
            answer = nccl_view.of_record(nccl)
    if not all(pid is None or type(pid) is int for pid in pids.values()):
        raise ProtocolError("the pid of a rank does not fit")
    return NodeScene(name, views, {rank: pid or 0 for rank, pid in pids.items()}, answer)


def find_culprits(nodes: Sequence[NodeScene], all_ranks: bool) -> HangFinding:
    """Returns who holds up the ranks of these nodes.

    Args:
        all_ranks: `nodes` are all nodes of the job; else only findings are returned that hold without the others.
    """
    views = [view for node in nodes for view in node.views]
    finding = collective.find_culprits(views, all_ranks)
    pids = {rank: pid for node in nodes for rank, pid in node.pids.items()}
    names = {rank: node.name for node in nodes for rank in node.pids}
    answers = [node.nccl for node in nodes if node.nccl is not None]
    # Clocks of two nodes are not compared. A rank that was ended may have ended before NCCL's answer on another node,
    # so that NCCL does not reach it proves nothing.
    ended = [view.rank for view in views if view.ended or view.gave_up]
    return nccl_view.refined(finding, answers, pids, names, ended)
