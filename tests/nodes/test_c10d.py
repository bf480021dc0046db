"""Two nodes with names and addresses of their own, over c10d rendezvous: real gloo training, clean and with a crash."""

from __future__ import annotations

from pathlib import Path

from tests.faults.test_ddp import DDP_WORKER
from tests.faults.training import DDP_STEPS, ITERATIONS, Plan, PlannedFault, ddp_weight
from tests.nodes.conftest import StartAgents

WORLD = 2


def test_a_clean_run(on_nodes: StartAgents) -> None:
    agents = on_nodes(WORLD, Plan(), "--nnodes=2", nproc=1, script=DDP_WORKER)
    agents.end(0, 0)
    assert (agents.folder / "ddp").read_text() == f"{DDP_STEPS} {ddp_weight(WORLD)}"
    assert [agent.cycles for agent in agents] == [[0], [0]]


def test_each_crash_is_restarted_on_both(on_nodes: StartAgents) -> None:
    plan = Plan((PlannedFault("exception", "step", 2, rank=1), PlannedFault("SIGKILL", "step", 4, rank=1)))
    agents = on_nodes(WORLD, plan, "--nnodes=2", "--max-restarts=2", nproc=1, script=DDP_WORKER)
    agents.end(0, 0)
    assert (agents.folder / "ddp").read_text() == f"{DDP_STEPS} {ddp_weight(WORLD)}"
    assert agents.faults() == [("exception", 1, 0), ("signal", 1, 1)], agents.tail()
    assert [agent.cycles for agent in agents] == [[0, 1, 2], [0, 1, 2]]


def test_the_store_on_a_node_of_its_own(on_nodes: StartAgents) -> None:
    agents = on_nodes(2, Plan(), "--nnodes=2", store_apart=True)
    agents.end(0, 0)
    agents.trained((ITERATIONS, 4))


def test_all_on_this_machine(on_loopback: StartAgents) -> None:
    agents = on_loopback(2, Plan((PlannedFault("exit 3", rank=3),)), "--nnodes=2", "--max-restarts=1")
    agents.end(0, 0)
    agents.trained((ITERATIONS, 4))


def test_the_order_is_that_of_node_rank(on_loopback: StartAgents) -> None:
    agents = on_loopback(0, Plan(), "--nnodes=2")
    for node_rank in (1, 0):  # by name, then by pid, the first to come would have rank 0
        agents.join(f"--node-rank={node_rank}", nproc=1)
    agents.end(0, 0)
    assert [agent.global_ranks(0) for agent in agents] == [{1}, {0}], agents.tail()
    assert all("will be ignored" not in agent.tail() for agent in agents)


def test_a_store_in_a_file(on_loopback: StartAgents, tmp_path: Path) -> None:
    store = (f"--rdzv-endpoint={tmp_path / 'store'}", "--rdzv-conf=store_type=file,join_timeout=60,last_call_timeout=1")
    agents = on_loopback(2, Plan((PlannedFault("exit 3", rank=3),)), "--nnodes=2", "--max-restarts=1", *store)
    agents.end(0, 0)
    agents.trained((ITERATIONS, 4))
    assert [agent.cycles for agent in agents] == [[0, 1], [0, 1]], agents.tail()
