"""Two launchers of one job on loopback, over torch's c10d rendezvous: a rank of one dies, and both go on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ft_launcher.record.journal_reader import Problems, read_journals
from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left, result_is_fault_free
from tests.faults.job import Job
from tests.faults.test_attribution import script
from tests.faults.training import Plan, PlannedFault
from tests.ports import free_port

WORLD = 4
FAULTY_RANK = 3


def global_ranks(job: Job) -> set[int]:
    (first, *_) = job.journal("cycle_start")
    return {rank["rank"] for rank in first["ranks"]}


HANG = """
import time
import torch, torch.distributed as dist

def load():
    time.sleep(600)

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    load()
dist.all_reduce(torch.ones(1))
"""


def test_at_a_hang_every_node_keeps_its_stacks(start_job: StartJob, tmp_path: Path) -> None:
    port = free_port()
    flags = (
        *("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=pair"),
        *("--rdzv-conf=join_timeout=60,last_call_timeout=1", "--ft-nccl-collective-timeout=5"),
    )
    nodes = [start_job(Plan(), 1, *flags, name=name, script=script(tmp_path, HANG)) for name in ("first", "second")]
    assert all(node.finish(120) for node in nodes), "\n".join(node.tail() for node in nodes)
    waits, sleeps = sorted(nodes, key=lambda node: min(global_ranks(node)))
    assert waits.journal("fault") == []
    (fault,) = sleeps.journal("fault")
    assert (fault["rank"], fault["fault_class"], fault["finding"]) == (1, "hang", "behind"), sleeps.tail()
    for node in nodes:
        assert re.search(r"ft_launcher: rank 1 on \S+ hangs: it .*, and 1 rank waits for it", node.output), node.tail()
    (kept,) = sleeps.journal("stacks")
    assert kept["ranks"][0]["place"] == "outside" and "in load" in kept["ranks"][0]["frames"][0]
    assert "where no rank failed: rank 1 is in no call of torch.distributed at train.py:7 in load" in sleeps.output


PRINTS = """
import os, sys, time
import torch, torch.distributed as dist

again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
dist.init_process_group("gloo")
for step in range(4 if again else 0, 10):
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        sys.stdout.write(f"iter {step}: loss 1.5, time 50.00ms, mfu 1.00%\\n")
        if step == 6 and not again:
            time.sleep(600)
"""
"""nanoGPT's lines, from one rank alone, which then stands still: the other one waits for it."""


def test_no_new_step_on_one_node_restarts_both(start_job: StartJob, tmp_path: Path) -> None:
    port = free_port()
    flags = (
        *("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=pair"),
        *("--rdzv-conf=join_timeout=60,last_call_timeout=1", "--max-restarts=1"),
        *("--ft-watch-log=nanogpt", "--ft-watch-log-timeout=6"),
    )
    nodes = [start_job(Plan(), 1, *flags, name=name, script=script(tmp_path, PRINTS)) for name in ("first", "second")]
    assert [node.finish(120) for node in nodes] == [0, 0], "\n".join(node.tail() for node in nodes)
    waits, prints = sorted(nodes, key=lambda node: min(global_ranks(node)))
    assert waits.journal("verdict", "fault", "printed_steps") == [], waits.tail()
    (verdict,) = prints.journal("verdict")
    assert (verdict["rank"], verdict["limit"], verdict["iteration"]) == (1, "log", 6), prints.tail()
    (fault,) = prints.journal("fault")
    assert (fault["rank"], fault["kind"], fault["limit"]) == (1, "hang", "log"), prints.tail()
    assert [line["rank"] for line in prints.journal("printed_steps")] == [1, 1], prints.tail()
    for node in nodes:
        assert [line["cycle"] for line in node.journal("cycle_start")] == [0, 1], node.tail()
        assert [line["how"] for line in node.journal("cycle_end")][-1] == "succeeded", node.tail()
        assert "rank 1 on " in node.output and "printed no new step for" in node.output, node.tail()
    assert "iter 9: loss 1.5" in prints.output and "iter " not in waits.output


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
    plan = Plan((PlannedFault(what, rank=FAULTY_RANK),))
    nodes = [start_job(plan, WORLD // 2, *flags, name=name) for name in ("first", "second")]
    assert [node.finish(120) for node in nodes] == [0, 0], "\n".join(node.tail() for node in nodes)
    for node in nodes:
        node.port = port
        nothing_left(node)
    result_is_fault_free(nodes[0], WORLD)
    assert set.union(*map(global_ranks, nodes)) == set(range(WORLD))
    for node in nodes:
        told = [(fault["rank"], fault["cycle"]) for fault in node.journal("fault")]
        assert told == ([(FAULTY_RANK, 0)] if FAULTY_RANK in global_ranks(node) else []), node.tail()
        assert [line["cycle"] for line in node.journal("cycle_start")] == [0, 1], node.tail()
    one_story_in_the_journals(nodes)


def one_story_in_the_journals(nodes: list[Job]) -> None:
    """Read together, the journals have every event of both, in the order of time."""
    findings = Problems()
    found = list(read_journals([node.journal_folder for node in nodes], findings, "pair"))
    assert findings == Problems() and len(found) == sum(len(node.journal()) for node in nodes)
    assert [entry.t for entry in found] == sorted(entry.t for entry in found)
    cycles = [entry.facts["cycle"] for entry in found if entry.event == "cycle_start"]
    assert cycles == [0, 0, 1, 1], "no node is a cycle ahead"
    assert len({entry.source for entry in found}) == 2 and {entry.attempt for entry in found} == {1}
