"""Evidence and faults as JSON: read as they were written, also by another release, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ft_launcher.decide.attribution import Fault, FaultClass, FaultKind, NodeEvidence, RankEvidence
from ft_launcher.decide.attribution.cycle_evidence import (
    CycleEvidence,
    fault_as_json,
    fault_of_json,
    of_record,
    to_record,
)
from ft_launcher.decide.attribution.nccl_view import Late, NcclProcess, NcclView
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.launcher_messages import Snapshot, Verdict
from rank_monitor.contract.wire.messages import RankException, ResultInDoubt

RESULT = ResultInDoubt("reproducible", 1, 7, "a", "cuda:1")
FAULT = Fault(
    *(FaultKind.HANG, 1, 1, 101, -9, "hangs: it is stopped", "in section step (5.1 s)", "the process is stopped"),
    detail=("train.py:3 in step",),
    others=("rank 0 was running",),
    agreed_exit_code=16,
    fault_class=FaultClass.HANG,
    doubt=RESULT,
    failed=(1,),
    finding="gone",
    blamed=(1,),
    waiting=1,
)
HUNG = RankEvidence(
    *(1, 1, 101, -9, 3.5),
    verdict=Verdict(0, 1, 101, "hang", 5, 5.1, False, 7, {"step": 5.1}, "for 5.1 s", "", ["a.py:3 in f"], {}, True),
    verdict_at=3.0,
    snapshot=Snapshot(1, True, True, 7, {"step": 5.0}, 5.0, groups={"0": {"entered": 4}}),
    was_stopped=True,
)
RAISED = RankEvidence(0, 0, 100, 1, 4.0, exception=RankException("ValueError", "bad", "", 1.0), exception_at=3.9)
PEER = NcclProcess("10.0.0.1", 101, 1, 2, True)
EVIDENCE = CycleEvidence(
    [RAISED, HUNG],
    NodeEvidence(None, 1 << 30),
    4.5,
    False,
    FAULT,
    {1: RESULT},
    {0: "exception"},
    NcclView(2, (PEER,), 1, (Late(PEER, "AllReduce", 3, 4),), 4.0),
)


def through_json(record: Any) -> Any:
    return json.loads(json.dumps(record))


def test_evidence_is_read_as_it_was_written() -> None:
    assert of_record(through_json(to_record(EVIDENCE))) == EVIDENCE
    nothing = CycleEvidence([])
    assert of_record(through_json(to_record(nothing))) == nothing


@pytest.mark.parametrize("fault", [FAULT, replace(FAULT, doubt=None, agreed_exit_code=None, kind=FaultKind.EXIT)])
def test_a_fault_is_read_as_it_was_written(fault: Fault) -> None:
    assert fault_of_json(through_json(fault_as_json(fault))) == fault


def test_a_fault_of_an_earlier_release_has_fewer_fields() -> None:
    first = ("kind", "rank", "local_rank", "pid", "exit_code", "what", "where", "hint")
    least = {name: fault_as_json(FAULT)[name] for name in first}
    assert fault_of_json(least) == Fault(*(getattr(FAULT, name) for name in first))


def test_what_a_later_release_wrote_besides_is_ignored() -> None:
    record = to_record(EVIDENCE)
    written = (record, record["ranks"][1], record["ranks"][1]["verdict"], record["otherwise"], record["nccl"])
    for part in written:
        part["of_next_year"] = {"x": 1}
    assert of_record(through_json(record)) == EVIDENCE


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no ranks": lambda record: record.pop("ranks"),
    "ranks": lambda record: record.update(ranks={}),
    "a rank": lambda record: record["ranks"].append(None),
    "a rank without a number": lambda record: record["ranks"][0].pop("rank"),
    "an exit code": lambda record: record["ranks"][0].update(exit_code="1"),
    "an exception": lambda record: record["ranks"][0].update(exception="ValueError"),
    "a verdict": lambda record: record["ranks"][1]["verdict"].pop("limit"),
    "a snapshot": lambda record: record["ranks"][1]["snapshot"].update(frames=[1]),
    "no node": lambda record: record.pop("node_evidence"),
    "a node": lambda record: record.update(node_evidence={"oom_kills": "1"}),
    "a time": lambda record: record.update(stop_began="now"),
    "a huge time": lambda record: record.update(stop_began=10**400),
    "a fault": lambda record: record.update(otherwise=[]),
    "a kind of fault": lambda record: record["otherwise"].update(kind="another"),
    "a class of fault": lambda record: record["otherwise"].update(fault_class=1),
    "lines of a fault": lambda record: record["otherwise"].update(detail=None),
    "blamed ranks": lambda record: record["otherwise"].update(blamed=["1"]),
    "a doubt": lambda record: record["otherwise"].update(doubt={"rank": 1}),
    "a suspect result": lambda record: record.update(suspect_results={"1": None}),
    "the rank of a suspect result": lambda record: record.update(suspect_results={"one": vars(RESULT)}),
    "faults on purpose": lambda record: record.update(on_purpose=[]),
    "NCCL": lambda record: record.update(nccl=[]),
    "a process of NCCL": lambda record: record["nccl"]["missing"].append({}),
    "a late rank": lambda record: record["nccl"]["late"][0].update(peer=None),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=list(WRONG))
def test_evidence_that_does_not_fit(change: Callable[[dict[str, Any]], Any]) -> None:
    record = through_json(to_record(EVIDENCE))
    change(record)
    with pytest.raises(ProtocolError):
        of_record(record)


@pytest.mark.parametrize("record", [None, [], "fault", 7, {}])
def test_what_is_no_fault(record: object) -> None:
    with pytest.raises(ProtocolError):
        fault_of_json(record)
