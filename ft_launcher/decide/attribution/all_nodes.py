"""Who holds up the ranks of all nodes at a hang, by what each node saw of its own. Pure.

The coordinator asks it (`decide/policy/job_policy.py`) with what the nodes sent, `ft_launcher replay` with their
journals.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_launcher.decide.attribution import collective, first_failure, nccl_view, rank_view
from ft_launcher.decide.attribution.cycle_evidence import RankEvidence
from ft_launcher.decide.attribution.fault import Blame
from ft_launcher.decide.attribution.nccl_view import NcclView
from ft_launcher.decide.attribution.rank_view import RankView
from rank_monitor.contract.errors import ProtocolError


@dataclass(frozen=True)
class NodeScene:
    """What one node saw.

    Attributes:
        name: of the node, for texts.
        views: of its ranks.
        pids: of its ranks, by global rank.
        nccl: what NCCL said of all ranks of the job there; None: nothing, or it was not asked.
    """

    name: str
    views: Sequence[RankView]
    pids: Mapping[int, int]
    nccl: NcclView | None = None


def to_record(
    ranks: Sequence[RankEvidence], stop_began: float | None, hung: bool, nccl: NcclView | None
) -> dict[str, Any]:
    """Returns what a node tells the others of its ranks after a fault, as `JoinRequest.views` has it.

    Args:
        stop_began: when the launcher began to stop the ranks (monotonic seconds).
        hung: the cycle ended by a hang.
        nccl: what NCCL says of the ranks of the job; None: nothing.
    """
    seen: dict[str, Any] = {}
    if hung:
        views = zip(rank_view.views(ranks, stop_began), ranks, strict=True)
        seen["ranks"] = [rank_view.to_record(view) | {"pid": rank.pid} for view, rank in views]
        if nccl is not None:
            seen["nccl"] = nccl_view.to_record(nccl)
    returned = list(first_failure.returned(ranks, stop_began).items())
    if returned:  # with two of them it is not known which one another rank has lost
        seen["returned"] = {str(rank): round(ago_s, 3) for rank, ago_s in returned[:2]}
    return seen


def of_records(name: str, ranks: Sequence[Any], nccl: Any) -> NodeScene:
    """Returns what a node sent: records of `rank_view.to_record` with the `pid` of each rank, and NCCL's answer there,
    which is left out if it does not fit.

    Raises:
        ProtocolError: the records do not fit.
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


def find(nodes: Sequence[NodeScene], all_ranks: bool) -> Blame:
    """Returns who holds up the others; `all_ranks`: these are all nodes of the job."""
    views = [view for node in nodes for view in node.views]
    blame = collective.find(views, all_ranks)
    pids = {rank: pid for node in nodes for rank, pid in node.pids.items()}
    names = {rank: node.name for node in nodes for rank in node.pids}
    answers = [node.nccl for node in nodes if node.nccl is not None]
    # Clocks of nodes are not compared: one that was ended may have been so before the answer of another node.
    ended = [view.rank for view in views if view.ended or view.gave_up]
    return nccl_view.refined(blame, answers, pids, names, ended)
