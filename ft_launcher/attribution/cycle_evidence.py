"""All that is known of a failed cycle on one node, as one value; this and the fault that follows from it as JSON. Pure.

`agent/failed_cycle.py` and `cycle/in_process.py` gather it, and `first_failure.py` finds the fault. The journal keeps
it, so that `ft_launcher replay` finds the fault again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ft_launcher.attribution import nccl_view
from ft_launcher.attribution.fault import Fault, FaultClass, FaultKind
from ft_launcher.attribution.hints import NodeEvidence
from ft_launcher.attribution.nccl_view import NcclView
from ft_launcher.attribution.rank_evidence import RankEvidence
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.json_record import from_json
from rank_monitor.contract.wire.launcher_messages import Snapshot, Verdict
from rank_monitor.contract.wire.messages import RankException, ResultInDoubt

_PARTS: dict[str, type] = {"verdict": Verdict, "exception": RankException, "snapshot": Snapshot}
_ALWAYS = ("rank", "local_rank", "pid")
_DEFAULTS = vars(RankEvidence(0, 0, 0))
_TUPLES = ("detail", "others", "failed", "blamed")


@dataclass(frozen=True)
class CycleEvidence:
    """Evidence of a node's ranks after the end of their cycle, or of one rank that ended while the others go on.

    Attributes:
        ranks: of every local rank that counts.
        node: of the node.
        stop_began: when the launcher began to stop the ranks (monotonic seconds); None: it has not.
        all_ranks: these are all ranks of the job.
        otherwise: the fault where no rank failed by itself: a restart in process failed, or all ranks were zombies.
        suspect_results: by local rank.
        on_purpose: by local rank, the fault on purpose that struck it in this cycle, in words.
        nccl: what NCCL says of the ranks of the job, after a hang; None: it was not asked, or did not answer in time.
    """

    ranks: Sequence[RankEvidence]
    node: NodeEvidence = field(default_factory=NodeEvidence)
    stop_began: float | None = None
    all_ranks: bool = True
    otherwise: Fault | None = None
    suspect_results: Mapping[int, ResultInDoubt] = field(default_factory=dict)
    on_purpose: Mapping[int, str] = field(default_factory=dict)
    nccl: NcclView | None = None

    def without_texts(self) -> CycleEvidence:
        """Returns what remains without anything that ranks wrote: exit codes and verdicts."""
        ends = [replace(rank, exception=None, exception_at=None, snapshot=None) for rank in self.ranks]
        return replace(self, ranks=ends, suspect_results={}, nccl=None)


def to_record(evidence: CycleEvidence) -> dict[str, Any]:
    """Returns JSON values, without the fields of ranks that have their defaults."""
    otherwise = None
    if evidence.otherwise is not None:
        otherwise = fault_as_json(evidence.otherwise)
    nccl = None
    if evidence.nccl is not None:
        nccl = nccl_view.to_record(evidence.nccl)
    return {
        "ranks": [_rank_record(rank) for rank in evidence.ranks],
        "node_evidence": asdict(evidence.node),
        "stop_began": evidence.stop_began,
        "all_ranks": evidence.all_ranks,
        "otherwise": otherwise,
        "suspect_results": {str(rank): asdict(result) for rank, result in evidence.suspect_results.items()},
        "on_purpose": {str(rank): text for rank, text in evidence.on_purpose.items()},
        "nccl": nccl,
    }


def of_record(record: Mapping[str, Any]) -> CycleEvidence:
    """Reads a record of `to_record`; keys that it does not have are ignored.

    Raises:
        ProtocolError: it is no such record.
    """
    try:
        otherwise = None
        if record["otherwise"] is not None:
            otherwise = fault_of_json(record["otherwise"])
        stop_began = record["stop_began"]
        if stop_began is not None:
            stop_began = float(stop_began)
        nccl = None
        if record.get("nccl") is not None:  # journals of earlier releases have none
            nccl = nccl_view.of_record(record["nccl"])
        return CycleEvidence(
            ranks=[_rank_of(rank) for rank in record["ranks"]],
            node=from_json(NodeEvidence, record["node_evidence"]),
            stop_began=stop_began,
            all_ranks=bool(record["all_ranks"]),
            otherwise=otherwise,
            suspect_results={int(rank): from_json(ResultInDoubt, r) for rank, r in record["suspect_results"].items()},
            on_purpose={int(rank): str(text) for rank, text in record["on_purpose"].items()},
            nccl=nccl,
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ProtocolError(f"the evidence of a cycle does not fit: {error!r}") from None


def fault_as_json(fault: Fault) -> dict[str, Any]:
    """Returns a fault as JSON values."""
    return asdict(fault) | {"kind": fault.kind.value, "fault_class": fault.fault_class.value}


def fault_of_json(record: Any) -> Fault:
    """Reads a record of `fault_as_json`, or the facts of an event `fault`; keys that no fault has are ignored.

    Raises:
        ProtocolError: it does not fit.
    """
    try:
        known = {member.name for member in fields(Fault)}
        values = {name: value for name, value in record.items() if name in known}
        values |= {name: tuple(values.get(name, ())) for name in _TUPLES}
        doubt = values.get("doubt")
        if doubt:
            values["doubt"] = from_json(ResultInDoubt, doubt)
        else:
            values["doubt"] = None
        values["kind"] = FaultKind(values["kind"])
        values["fault_class"] = FaultClass(values.get("fault_class", FaultClass.UNKNOWN))
        return from_json(Fault, values)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ProtocolError(f"a fault does not fit: {error}") from None


def _rank_record(rank: RankEvidence) -> dict[str, Any]:
    found = {}
    for name, value in vars(rank).items():
        if name in _PARTS and value is not None:
            found[name] = dict(vars(value))  # JSON values only; `asdict` copies them, which takes three times as long
        elif name in _ALWAYS or value != _DEFAULTS[name]:
            found[name] = value
    return found


def _rank_of(record: Mapping[str, Any]) -> RankEvidence:
    known = {member.name for member in fields(RankEvidence)}
    values = {name: value for name, value in record.items() if name in known}
    for name, kind in _PARTS.items():
        if name in values:
            values[name] = from_json(kind, values[name])
    return from_json(RankEvidence, values)
