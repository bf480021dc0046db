"""What NCCL's own watch adds to a hang in which all ranks are in one collective: tables of answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ft_launcher.decide.attribution import FaultKind, RankEvidence
from ft_launcher.decide.attribution.cycle_evidence import CycleEvidence, of_record, to_record
from ft_launcher.decide.attribution.fault import HangFinding, HangKind
from ft_launcher.decide.attribution.first_failure import attribute, find_fault
from ft_launcher.decide.attribution.nccl_view import Late, NcclProcess, NcclView, refined
from ft_launcher.decide.attribution.nccl_view import of_record as of_answer
from ft_launcher.decide.attribution.nccl_view import to_record as to_answer
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.launcher_messages import Snapshot, Verdict

IN_IT = "all 8 ranks are in all_reduce 4 of group dp"
NETWORK = f"{IN_IT}, and it does not end: the network, or a device"
NAMED = f"is given up by NCCL's RAS, which cannot reach it, while {IN_IT}"
TRANSPORT = HangFinding(HangKind.TRANSPORT, (), NETWORK, tuple(range(8)))
PIDS = {rank: 100 + rank for rank in range(8)}
IN_CONTAINERS = {rank: 100 + rank % 4 for rank in range(8)}
NODES = {rank: f"node{rank // 4}" for rank in range(8)}


def peer(rank: int, is_dead: bool = True, **changes: Any) -> NcclProcess:
    return replace(NcclProcess(f"10.0.0.{rank // 4}", 100 + rank, rank, 8, is_dead), **changes)


def view(*missing: NcclProcess, late: tuple[Late, ...] = (), processes: int = 8) -> NcclView:
    return NcclView(processes, missing, len(missing), late, 5.0)


ALL_WELL = view()
CUT_OFF = view(*(peer(rank) for rank in range(7)))


@pytest.mark.parametrize(
    ("answers", "ranks", "text"),
    [
        ([view(peer(3))], (3,), NAMED),
        (
            [view(peer(3), peer(1), peer(2))],
            (1, 2, 3),
            f"is given up by NCCL's RAS, which cannot reach ranks 1-3, while {IN_IT}",
        ),
        # An answer of one that is cut off itself blames all others.
        ([CUT_OFF, view(peer(7))], (7,), NAMED),
        # Only what all say.
        ([view(peer(3)), view(peer(3), peer(4))], (3,), NAMED),
        ([view(peer(3)), view(peer(4))], (), NETWORK),
        # Not in time: the launcher may have ended it.
        ([view(peer(3, False))], (), f"{NETWORK}; NCCL's RAS got no answer from rank 3"),
        ([view(peer(3, False), peer(4))], (4,), NAMED),
        ([ALL_WELL], (), f"{NETWORK}; NCCL's RAS reaches all 8"),
        # The first one had them all; when the second answered, ranks were being ended.
        ([ALL_WELL, view(peer(3, False))], (), f"{NETWORK}; NCCL's RAS reaches all 8"),
        # One that has left a communicator, or one of an earlier iteration: nothing can be said.
        ([view(processes=9)], (), NETWORK),
        ([view(peer(3, pid=4711), processes=9)], (), NETWORK),
        (
            [view(late=(Late(peer(3), "AllReduce", 17, 18),))],
            (),
            f"{NETWORK}; by NCCL's RAS rank 3 has launched 17 AllReduce operations where another of its communicator "
            "has launched 18",
        ),
        (
            [view(late=(Late(peer(3), "", 17, 18),))],
            (),
            f"{NETWORK}; by NCCL's RAS rank 3 has launched 17 operations where another of its communicator has "
            "launched 18",
        ),
        ([CUT_OFF], (), NETWORK),
        ([view(*(peer(rank) for rank in range(4)))], (), NETWORK),
        ([], (), NETWORK),
    ],
)  # fmt: skip
def test_whom_an_answer_names(answers: list[NcclView], ranks: tuple[int, ...], text: str) -> None:
    finding = refined(TRANSPORT, answers, PIDS)
    assert (finding.kind, finding.culprits, finding.text) == (HangKind.TRANSPORT, ranks, text)
    assert finding.waiting == tuple(rank for rank in range(8) if rank not in ranks)


@pytest.mark.parametrize(
    ("missing", "ranks"),
    [
        (peer(5, pid=101), (5,)),
        # By a pid alone it may be rank 1 or rank 5.
        (peer(5, pid=101, size=4), ()),
        (replace(peer(5, pid=101), rank=-1), ()),
        # Torch's ranks have another order in this communicator.
        (peer(4, pid=101), ()),
    ],
)
def test_pids_that_are_the_same_on_both_nodes(missing: NcclProcess, ranks: tuple[int, ...]) -> None:
    assert refined(TRANSPORT, [view(missing)], IN_CONTAINERS, NODES).culprits == ranks


REPLACED = {0: 100, 1: 101, 2: 102, 3: 140, 4: 100, 5: 101, 6: 102, 7: 103}
"""In containers on two nodes: rank 3 was pid 103 as well, died, and was replaced in process."""


@pytest.mark.parametrize(
    ("pids", "missing"),
    [
        (REPLACED, replace(peer(3), rank=-1, size=0)),
        (REPLACED, peer(3, size=4)),
        (REPLACED, peer(3)),
        # The new rank 3 is on the other node, where it has the pid of the one that died.
        (REPLACED | {3: 103, 7: 107}, peer(3)),
    ],
    ids=["by its pid", "in a smaller communicator", "in one of all ranks", "by a spare with its pid"],
)
def test_a_process_that_was_replaced_is_given_up_for_ever(pids: dict[int, int], missing: NcclProcess) -> None:
    assert refined(TRANSPORT, [view(missing, processes=9)], pids, NODES) == TRANSPORT


def test_one_node_of_several_knows_a_rank_only_by_its_number_among_all() -> None:
    assert refined(TRANSPORT, [view(peer(7, size=4))], PIDS, NODES).culprits == ()
    assert refined(TRANSPORT, [view(peer(7))], PIDS, NODES).culprits == (7,)


def test_of_one_that_was_ended_before_the_answer_none_is_expected() -> None:
    silent = view(peer(3, False), peer(5, False))
    assert refined(TRANSPORT, [silent], PIDS, ended=[3]).text == f"{NETWORK}; NCCL's RAS got no answer from rank 5"
    assert refined(TRANSPORT, [silent], PIDS, ended=[3, 5]).text == NETWORK
    assert refined(TRANSPORT, [view(peer(3))], PIDS, ended=[3]).culprits == (3,)


def test_nodes_are_named() -> None:
    finding = refined(TRANSPORT, [view(peer(3), peer(5), peer(6))], PIDS, NODES)
    assert "cannot reach rank 3 on node0, ranks 5-6 on node1, while" in finding.text


@pytest.mark.parametrize("finding", [finding for finding in HangKind if finding is not HangKind.TRANSPORT])
def test_another_finding_stands(finding: HangKind) -> None:
    finding = HangFinding(finding, (2,), "text", (0, 1))
    assert refined(finding, [view(peer(3))], PIDS) == finding


# With the evidence of a cycle.

WAITS = ["torch/distributed/distributed_c10d.py:3252 in all_reduce", "train.py:20 in step"]


def rank(number: int) -> RankEvidence:
    """One that is in its fourth collective, and was ended for that."""
    verdict = Verdict(
        0, number, 100 + number, "section:step", 5.0, 5.1, False, 7, {"step": 5.1}, "in section step for 5.1 s", "",
        WAITS, {"state": "S", "wchan": "futex_wait"}, True,
    )  # fmt: skip
    group = {"entered": 4, "finished": 3, "operation": "all_reduce", "shape": "[[4]]", "description": "dp"}
    snapshot = Snapshot(1, True, True, 7, {"step": 5.1}, 0.1, frames=WAITS, process={"state": "S"}, groups={"0": group})
    return RankEvidence(
        number, number, 100 + number, exit_code=-9, died_at=2.0, verdict=verdict, verdict_at=1.0, snapshot=snapshot
    )


def evidence(nccl: NcclView | None) -> CycleEvidence:
    return CycleEvidence([rank(number) for number in range(8)], stop_began=3.0, nccl=nccl)


def test_a_rank_that_nccl_has_given_up_is_the_fault() -> None:
    fault = attribute(evidence(view(peer(3))))
    assert fault is not None
    assert (fault.kind, fault.rank, fault.collateral) == (FaultKind.HANG, 3, False)
    assert (fault.finding, fault.blamed, fault.waiting) == ("transport", (3,), 7)
    told = f"it is given up by NCCL's RAS, which cannot reach it, while {IN_IT}, and 7 ranks wait for it"
    assert fault.what == f"hangs: {told}; in section step for 5.1 s"


def test_a_hint_says_that_nccl_reaches_all() -> None:
    fault = attribute(evidence(ALL_WELL))
    assert fault is not None
    assert (fault.rank, fault.collateral, fault.blamed) == (0, True, ())
    assert fault.hint.startswith(f"{NETWORK}; NCCL's RAS reaches all 8")


@pytest.mark.parametrize(
    ("answered_at", "end"), [(1.5, "; NCCL's RAS got no answer from rank 3"), (2.5, "")], ids=["before", "after"]
)
def test_an_answer_before_and_after_the_ranks_were_ended(answered_at: float, end: str) -> None:
    nccl = replace(view(peer(3, False)), answered_at=answered_at)
    fault = attribute(evidence(nccl))
    assert fault is not None and fault.hint == f"{NETWORK}{end}"


@pytest.mark.parametrize("nccl", [None, ALL_WELL, view(peer(3)), view(late=(Late(peer(3), "AllReduce", 17, 18),))])
def test_a_record_of_evidence_is_read_again(nccl: NcclView | None) -> None:
    found = of_record(json.loads(json.dumps(to_record(evidence(nccl)))))
    assert found.nccl == nccl
    faults = [find_fault(known, pytest.fail) for known in (found, evidence(nccl))]
    assert faults[0] == faults[1]


@pytest.mark.parametrize("launched", [float("inf"), float("nan"), "many", None])
def test_a_record_of_an_answer_that_does_not_fit(launched: Any) -> None:
    record = to_answer(view(late=(Late(peer(3), "AllReduce", 17, 18),)))
    record["late"][0]["launched"] = launched
    with pytest.raises(ProtocolError, match="does not fit"):
        of_answer(record)


def test_a_journal_of_an_earlier_release_has_none() -> None:
    record = to_record(evidence(None))
    del record["nccl"]
    assert of_record(record).nccl is None
