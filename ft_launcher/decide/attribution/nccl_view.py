"""What NCCL's RAS says of a job, and what that adds to a hang in which all ranks wait in one collective. Pure.

RAS is NCCL's own watch: a thread in each process that uses NCCL connects to the others, beside the network that carries
the collectives. `agent/cycle/nccl_ras.py` asks one of these threads, `ras_answer.py` reads the answer as an `NcclView`,
and `refined` uses it in `first_failure.py` and `all_nodes.py`.

In a TRANSPORT finding every rank did its part, so the collectives name nobody. RAS may: it knows which processes it
does not reach. A process that did not answer in time may be one that the launcher has just ended. So a rank is named
only where NCCL has given its process up, which NCCL does after 60 s without a connection (NVIDIA's NCCL user guide,
"RAS").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ft_launcher.decide.attribution.fault import NETWORK_OR_DEVICE, HangFinding, HangKind
from rank_monitor.contract.rounds.barrier import ranges_of
from rank_monitor.contract.wire.json_record import from_json, to_json

_MAX_KEPT = 64
"""Processes of one kind that are kept of an answer. More than that are a part of the network that is cut off, and then
no rank is named anyway."""
_MAX_SHOWN = 4
"""Nodes whose ranks a text names. The text is one line on the console; further nodes are counted."""


@dataclass(frozen=True)
class NcclProcess:
    """A process that uses NCCL, as NCCL names it: by host and pid, since NCCL does not know torch's global ranks.

    Attributes:
        host: its address as text; not a node's name.
        rank: its number in the largest communicator for which the answer gives one; -1: the answer gives none.
        size: the number of ranks of that communicator.
        is_dead: NCCL has given the process up; False: the process did not answer in time.
    """

    host: str
    pid: int
    rank: int = -1
    size: int = 0
    is_dead: bool = False


@dataclass(frozen=True)
class Late:
    """A rank that has launched fewer collectives of a kind than others of its communicator have.

    Attributes:
        peer: the process of the rank; `rank` and `size` are those of this communicator.
        operation: the kind of collective; empty: the answer counts all kinds together.
        launched: how many the rank has launched.
        others: how many the rank with the most has launched.
    """

    peer: NcclProcess
    operation: str
    launched: int
    others: int


@dataclass(frozen=True)
class NcclView:
    """One answer of NCCL's RAS about the whole job.

    Attributes:
        processes: how many processes NCCL knows, reached or not.
        missing: processes that NCCL does not reach, at most 64.
        missing_count: how many processes NCCL does not reach in all.
        late: ranks that have launched fewer collectives than others, at most 64.
        answered_at: when the answer was complete (monotonic seconds of the node that asked); 0: not known.
    """

    processes: int
    missing: tuple[NcclProcess, ...] = ()
    missing_count: int = 0
    late: tuple[Late, ...] = ()
    answered_at: float = 0.0

    @property
    def is_cut_off(self) -> bool:
        """Whether the process that answered reaches half of the job or less. Then its own network may be the fault, and
        its answer names nobody."""
        return 2 * self.missing_count >= self.processes


def view_of(processes: int, missing: Sequence[NcclProcess], missing_count: int, late: Sequence[Late]) -> NcclView:
    """Returns the view of an answer, with at most 64 of the missing and of the late processes."""
    return NcclView(processes, tuple(missing[:_MAX_KEPT]), missing_count, tuple(late[:_MAX_KEPT]))


def to_record(view: NcclView) -> dict[str, Any]:
    """Returns a view as JSON values, for the journal and for the coordinator."""
    return to_json(view)


def of_record(record: Any) -> NcclView:
    """Returns the view in a record of `to_record`. Another node wrote the record, so its lists are cut again.

    Raises:
        ProtocolError: the record is not one of `to_record`.
    """
    view = from_json(NcclView, record)
    return replace(view, missing=view.missing[:_MAX_KEPT], late=view.late[:_MAX_KEPT])


def refined(
    finding: HangFinding,
    answers: Sequence[NcclView],
    pids: Mapping[int, int],
    nodes: Mapping[int, str] | None = None,
    ended: Collection[int] = (),
) -> HangFinding:
    """Returns a TRANSPORT finding with what NCCL adds to it; each other finding unchanged.

    The culprits are the ranks that NCCL has given up, if all answers name them and they are less than half of the job.
    Answers of processes that reach half of the job or less do not count. Where nobody is named, the text says what NCCL
    knows: whom it does not reach, who launched fewer operations, or that it reaches all ranks.

    On several nodes the finding stays unchanged if an answer counts more or fewer processes than there are ranks. NCCL
    gives up a process that died and was replaced in process for ever, and in containers a rank of another node may have
    its pid.

    Args:
        finding: by the collectives that each rank has entered and finished.
        answers: of any nodes; empty: nothing is added.
        pids: of all ranks of the job, by global rank.
        nodes: global rank -> name of its node, for the text; None: all ranks are on one node, where a pid names one
            process.
        ended: ranks that the launcher may have ended before an answer. That such a rank did not answer means nothing.
    """
    answers = [answer for answer in answers if not answer.is_cut_off]
    if finding.kind is not HangKind.TRANSPORT or not answers:
        return finding
    if nodes is not None and any(view.processes != len(pids) for view in answers):
        return finding
    is_one_node = nodes is None
    dead = set.intersection(
        *(_ranks_of([peer for peer in view.missing if peer.is_dead], pids, is_one_node) for view in answers)
    )
    if dead and 2 * len(dead) < len(pids):
        who = "it"
        if len(dead) > 1:
            who = _who(dead, nodes or {})
        what = finding.text.removesuffix(NETWORK_OR_DEVICE)
        text = f"is given up by NCCL's RAS, which cannot reach {who}, while {what}"
        waiting = tuple(rank for rank in sorted(pids) if rank not in dead)
        return HangFinding(HangKind.TRANSPORT, tuple(sorted(dead)), text, waiting)
    return replace(finding, text=f"{finding.text}{_remark(answers, pids, nodes, ended)}")


def _remark(
    answers: Sequence[NcclView], pids: Mapping[int, int], nodes: Mapping[int, str] | None, ended: Collection[int]
) -> str:
    """Returns what NCCL knows where it names no culprit, as the end of the text: first a rank that has launched fewer
    operations, then whom NCCL does not reach. Empty: nothing."""
    is_one_node = nodes is None
    nodes = nodes or {}
    for late in (one for view in answers for one in view.late):
        rank = _rank_of(late.peer, pids, is_one_node)
        if rank is not None:
            kind = f"{late.operation} operations".strip()
            counts = f"has launched {late.launched} {kind} where another of its communicator has launched {late.others}"
            return f"; by NCCL's RAS {_who([rank], nodes)} {counts}"
    # One answer that reaches all ranks is enough: a later answer may miss ranks that were just being ended.
    if any(not view.missing_count and view.processes == len(pids) for view in answers):
        return f"; NCCL's RAS reaches all {len(pids)}"
    missing = set.intersection(*(_ranks_of(view.missing, pids, is_one_node) for view in answers)).difference(ended)
    if missing:
        return f"; NCCL's RAS got no answer from {_who(missing, nodes)}"
    return ""


def _ranks_of(peers: Sequence[NcclProcess], pids: Mapping[int, int], is_one_node: bool) -> set[int]:
    found = {_rank_of(peer, pids, is_one_node) for peer in peers}
    return {rank for rank in found if rank is not None}


def _rank_of(peer: NcclProcess, pids: Mapping[int, int], is_one_node: bool) -> int | None:
    """Returns the global rank of a process; None if no rank of the job has this pid, or several ranks may have it.

    In containers ranks of different nodes have the same pids, and nothing says which node has the address that NCCL
    gives. So on several nodes a process is known only by its number in a communicator of all ranks, which is torch's
    global rank. On one node the pid alone is enough.
    """
    same = [rank for rank, pid in pids.items() if pid == peer.pid]
    if peer.size == len(pids) and peer.rank in same:
        return peer.rank
    if is_one_node and peer.size != len(pids) and len(same) == 1:
        return same[0]
    return None


def _who(ranks: Sequence[int] | set[int], nodes: Mapping[int, str]) -> str:
    """Returns names of ranks, with their nodes where these are known: `ranks 8-15 on node52`."""
    by_node: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_node.setdefault(nodes.get(rank, ""), []).append(rank)
    parts = []
    for node, found in list(by_node.items())[:_MAX_SHOWN]:
        text = f"rank{'s' * (len(found) > 1)} {ranges_of(found)}"
        if node:
            text += f" on {node}"
        parts.append(text)
    if len(by_node) > _MAX_SHOWN:
        parts.append(f"those of {len(by_node) - _MAX_SHOWN} more nodes")
    return ", ".join(parts)
