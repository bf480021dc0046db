"""What the class of a fault changes on several nodes: the ranks leave a node whose hardware is suspected."""

from __future__ import annotations

from tests.faults.training import ITERATIONS, Plan, PlannedFault
from tests.nodes.conftest import StartAgents

QUICK = ("--ft-node-timeout=5", "--ft-node-beat=0.5")


def test_a_spare_takes_the_place_of_a_node_whose_hardware_is_suspected(on_loopback: StartAgents) -> None:
    plan = Plan((PlannedFault("GPU fault", iteration=6, rank=3),), hold=4)
    agents = on_loopback(1, plan, "--nnodes=2", "--ft-spares=1", "--max-restarts=0", *QUICK, store_apart=True)
    left = agents.join("--node-rank=1")
    agents.until_train(4, world=4)
    spare = agents.join()
    spare.until_event("job_start")
    agents.stay(1)
    agents.go()
    agents.end(0, 0, 0)
    agents.trained((ITERATIONS, 4))
    assert [left.cycles, spare.cycles] == [[0], [1]], agents.tail()
    (fault,) = left.journal("fault")
    assert (fault["rank"], fault["fault_class"]) == (3, "hardware suspected"), agents.tail()
    (decision,) = left.journal("decision")
    assert not decision["charged"] and "another node takes the place" in decision["reason"], agents.tail()
