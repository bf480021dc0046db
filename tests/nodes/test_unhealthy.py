"""A node that its own check calls unhealthy takes no part, and another takes its place."""

from __future__ import annotations

from pathlib import Path

from tests.faults.training import ITERATIONS, Plan, PlannedFault
from tests.nodes.conftest import StartAgents

UNHEALTHY = 83
QUICK = ("--ft-node-timeout=5", "--ft-node-beat=0.5")


def test_a_node_that_is_unhealthy_from_the_start_runs_nothing(on_loopback: StartAgents) -> None:
    agents = on_loopback(1, Plan(), "--nnodes=1", "--ft-node-check=echo the fan stands still; false")
    agents.end(UNHEALTHY)
    assert agents[0].cycles == []
    assert "the fan stands still" in agents[0].journal("job_end")[0]["reason"], agents.tail()


def test_a_spare_takes_the_place_of_a_node_that_falls_ill(on_loopback: StartAgents, tmp_path: Path) -> None:
    """Its check is made before each cycle, so the crash that ends the first cycle brings it to light."""
    ill = tmp_path / "ill"
    plan = Plan((PlannedFault("SIGKILL", iteration=6, rank=3),), hold=4)
    agents = on_loopback(1, plan, "--nnodes=2", "--ft-spares=1", "--max-restarts=1", *QUICK, store_apart=True)
    falls_ill = agents.join(f"--ft-node-check=test ! -e {ill}", "--node-rank=1")
    agents.until_train(4, world=4)
    spare = agents.join()
    spare.until_event("job_start")
    ill.touch()
    agents.go()
    agents.until_train(ITERATIONS, world=4, cycle=1)
    assert agents.node_of(3) is falls_ill, agents.tail()
    agents.end(0, UNHEALTHY, 0)
    agents.trained((ITERATIONS, 4))
    assert spare.cycles == [1], agents.tail()
    assert agents.faults() == [("signal", 3, 0)], agents.tail()


def test_a_rank_that_wants_other_hardware_gets_the_spare(on_loopback: StartAgents) -> None:
    """Exit code 16: not charged, so no restart is needed for it; the node it left is the spare now."""
    plan = Plan((PlannedFault("exit 16", iteration=6, rank=3),), hold=4)
    flags = ("--nnodes=2", "--ft-spares=1", "--max-restarts=0", "--workers-stop-timeout=2", *QUICK)
    agents = on_loopback(1, plan, *flags, store_apart=True)
    left = agents.join("--node-rank=1")
    agents.until_train(4, world=4)
    spare = agents.join()
    spare.until_event("job_start")
    agents.stay(1)
    agents.go()
    agents.end(0, 0, 0)
    agents.trained((ITERATIONS, 4))
    assert [left.cycles, spare.cycles] == [[0], [1]], agents.tail()
    decisions = [line for agent in agents for line in agent.journal("decision")]
    assert [(line["action"], line["charged"]) for line in decisions] == [("restart", False)], agents.tail()
