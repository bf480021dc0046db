"""What NCCL's own watch (RAS) says of a job, and what that adds to a hang in which all wait in one collective. Pure.

The RAS threads of all processes that use NCCL connect to each other, beside the network that carries the collectives,
and watch each other. `ras_answer.py` reads their answer, `agent/cycle/nccl_ras.py` asks for it.

A process that did not answer in time may be one that the launcher has just ended. So a rank is named only where NCCL
has given it up: it does so when it has not reached a process for 60 s (NVIDIA's NCCL user guide, "RAS").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ft_launcher.decide.attribution.fault import NETWORK_OR_DEVICE, HangFinding, HangKind
from rank_monitor.contract.rounds.barrier import ranges_of
from rank_monitor.contract.wire.json_record import from_json, to_json

_MAX_KEPT = 64
"""Processes of one kind in an answer: more are a part of the network that is cut off, of which no rank is named."""
_MAX_SHOWN = 4
"""The text is one line on the console; further ranks are counted."""


@dataclass(frozen=True)
class NcclProcess:
    """A process that uses NCCL, as NCCL names it.

    Attributes:
        host: an address, as text.
        rank: its number in the largest communicator of which the answer says it; -1: it says none.
        size: of that communicator.
        is_dead: NCCL has given it up; else it did not answer in time.
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
        peer: its process; `rank` and `size` are those of this communicator.
        operation: the kind; empty: the answer counts all kinds together.
        launched: how many it has launched.
        others: how many the one has that has launched most.
    """

    peer: NcclProcess
    operation: str
    launched: int
    others: int


@dataclass(frozen=True)
class NcclView:
    """One answer of NCCL.

    Attributes:
        processes: how many processes it knows, those included that it does not reach.
        missing: those that it does not reach, at most 64.
        missing_count: how many these are in all.
        late: at most 64.
        answered_at: when the answer was there (monotonic seconds of the node that asked); 0: not known.
    """

    processes: int
    missing: tuple[NcclProcess, ...] = ()
    missing_count: int = 0
    late: tuple[Late, ...] = ()
    answered_at: float = 0.0

    @property
    def is_cut_off(self) -> bool:
        """Whether the one that answered reaches half of the job or less, so that the fault may be its own."""
        return 2 * self.missing_count >= self.processes


def view_of(processes: int, missing: Sequence[NcclProcess], missing_count: int, late: Sequence[Late]) -> NcclView:
    """Returns an answer, with as much of it as is kept."""
    return NcclView(processes, tuple(missing[:_MAX_KEPT]), missing_count, tuple(late[:_MAX_KEPT]))


def to_record(view: NcclView) -> dict[str, Any]:
    """Returns an answer as JSON values."""
    return to_json(view)


def of_record(record: Any) -> NcclView:
    """Reads a record of `to_record`, with as much of it as is kept.

    Raises:
        ProtocolError: it does not fit.
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
    """Returns who holds up the others, by what NCCL says of a collective that all have entered and none finished.

    Names the ranks that NCCL has given up, in all answers of processes that reach most of the job. Otherwise the text
    says whom it does not reach, or that all are in it. Any other finding is returned as it is. So is any finding where
    there are several nodes and an answer knows other processes than the ranks: one that died and was replaced in
    process is given up for ever, and in containers a rank of another node has its pid.

    Args:
        finding: by the collectives that each rank has entered and finished.
        answers: of any nodes; none: nothing is added.
        pids: of all ranks of the job, by global rank.
        nodes: names of their nodes, for the text; None: it is one node, on which each pid is that of one process.
        ended: ranks that may have been ended before an answer: that it has none from them means nothing.
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
    is_one_node = nodes is None
    nodes = nodes or {}
    for late in (one for view in answers for one in view.late):
        rank = _rank_of(late.peer, pids, is_one_node)
        if rank is not None:
            kind = f"{late.operation} operations".strip()
            counts = f"has launched {late.launched} {kind} where another of its communicator has launched {late.others}"
            return f"; by NCCL's RAS {_who([rank], nodes)} {counts}"
    # The first answer is worth most: later ones may miss ranks because they were being ended.
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
    """The global rank of a process; None if no rank of the job has this pid, or several may have it.

    In containers ranks of different nodes have the same pids, and nothing says which node is at NCCL's address: there
    only the number in a communicator of all ranks counts, which is torch's.
    """
    same = [rank for rank, pid in pids.items() if pid == peer.pid]
    if peer.size == len(pids) and peer.rank in same:
        return peer.rank
    if is_one_node and peer.size != len(pids) and len(same) == 1:
        return same[0]
    return None


def _who(ranks: Sequence[int] | set[int], nodes: Mapping[int, str]) -> str:
    """Names ranks, with their nodes where these are known: `ranks 8-15 on node52`."""
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
