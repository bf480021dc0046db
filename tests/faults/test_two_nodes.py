"""Two launchers of one job on loopback, over torch's c10d rendezvous: a rank of one dies, and both go on."""

from __future__ import annotations

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left, result_is_fault_free
from tests.faults.job import Job, free_port
from tests.faults.training import Plan, Strike

WORLD = 4
STRUCK = 3


def global_ranks(job: Job) -> set[int]:
    (first, *_) = job.journal("cycle_start")
    return {rank["rank"] for rank in first["ranks"]}


@pytest.mark.parametrize("what", ["exit 3", "SIGKILL"])
def test_both_nodes_restart(start_job: StartJob, what: str) -> None:
    port = free_port()
    flags = (
        "--nnodes=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=pair",
        "--rdzv-conf=join_timeout=60,last_call_timeout=1",
        "--max-restarts=2",
    )
    plan = Plan((Strike(what, rank=STRUCK),))
    nodes = [start_job(plan, WORLD // 2, *flags, name=name) for name in ("first", "second")]
    assert [node.finish(120) for node in nodes] == [0, 0], "\n".join(node.tail() for node in nodes)
    for node in nodes:
        node.port = port
        nothing_left(node)
    result_is_fault_free(nodes[0], WORLD)
    assert set.union(*map(global_ranks, nodes)) == set(range(WORLD))
    for node in nodes:
        told = [(fault["rank"], fault["cycle"]) for fault in node.journal("fault")]
        assert told == ([(STRUCK, 0)] if STRUCK in global_ranks(node) else []), node.tail()
        assert [line["cycle"] for line in node.journal("cycle_start")] == [0, 1], node.tail()
