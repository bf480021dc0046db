"""A hang over several nodes: the rank that all wait for is named on each of them, wherever it is."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.faults.hang_worker import FAULTY_STEP
from tests.faults.test_guilty_rank import HAS_RECORDER, LIMIT_S, WORKER
from tests.faults.training import Plan
from tests.nodes.conftest import StartAgents

HANG = 85


@pytest.mark.skipif(not HAS_RECORDER, reason="this torch has no flight recorder that answers in JSON")
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_without_a_limit_of_its_own(on_loopback: StartAgents, tmp_path: Path, rank: int) -> None:
    """Only the ranks that wait exceed their limit; their nodes see nothing of the one that does not come."""
    (tmp_path / "hang").write_text(f"sleeps outside:{rank}")
    flags = ("--nnodes=4", "--max-restarts=0", f"--ft-rank-section-timeouts=step:{LIMIT_S}")
    agents = on_loopback(4, Plan(), *flags, nproc=1, script=WORKER)
    agents.end(HANG, HANG, HANG, HANG, limit_s=180)
    hangs = f"rank {rank} on {socket.gethostname()} hangs"
    named = f"ft_launcher: {hangs}: it never entered all_reduce {FAULTY_STEP + 1} of group "
    for agent in agents:
        assert agent.output.count(named) == 1, agents.tail()
        assert ", and 3 ranks wait for it" in agent.output, agents.tail()
    (fault,) = [fault for agent in agents for fault in agent.journal("fault")]
    (started,) = [start for agent in agents for start in agent.journal("cycle_start") if start["node_rank"] == rank]
    assert (fault["rank"], fault["pid"], fault["finding"]) == (rank, started["ranks"][0]["pid"], "behind")


@pytest.mark.skipif(not HAS_RECORDER, reason="this torch has no flight recorder that answers in JSON")
def test_the_function_is_told_who_held_up_the_others(on_loopback: StartAgents, tmp_path: Path) -> None:
    """Before a restart in process, on the node that hosts the ranks' store and on the other one."""
    faulty = [1, 2]
    (tmp_path / "hang").write_text(" ".join(map(str, faulty)))
    agents = on_loopback(2, Plan(), "--nnodes=2", nproc=2, script=WORKER.with_name("in_process_blame_worker.py"))
    agents.end(0, 0, limit_s=180)
    (host,) = [agent for agent in agents if agent.event("cycle_start", node_rank=0)]
    blames = host.journal("in_process_blame")
    assert [(blame["iteration"], blame["finding"], blame["ranks"]) for blame in blames] == [
        (0, "behind", [1]),
        (1, "behind", [2]),
    ]
    for call, (rank, blame) in enumerate(zip(faulty, blames, strict=True), 1):
        assert blame["text"].startswith(f"rank {rank} on {socket.gethostname()} never entered all_reduce {5 - call} of")
        assert ", and 3 ranks wait for it; it is at in_process_blame_worker.py" in blame["text"]
        told = [json.loads((tmp_path / f"told.{call}.{number}").read_text()) for number in range(4)]
        assert told == [{"ranks": [rank], "finding": "behind", "text": blame["text"]}] * 4


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_rank_of_another_node_returns_while_others_need_it(on_loopback: StartAgents, nproc: int) -> None:
    """With one rank its node is done before the others fail."""
    agents = on_loopback(
        2, Plan(), "--nnodes=2", "--max-restarts=0", nproc=nproc, script=WORKER.with_name("returning_worker.py")
    )
    agents.end(1, 1, limit_s=180)
    (fault,) = [fault for agent in agents for fault in agent.journal("fault")]
    assert (fault["kind"], fault["finding"], fault["blamed"]) == ("exception", "returned", [2 * nproc - 1])
    for agent in agents:
        assert len(agent.journal("cycle_end")) == 1, agents.tail()
