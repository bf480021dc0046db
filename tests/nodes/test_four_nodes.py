"""Four nodes with names and addresses of their own, and a store apart: one of them is lost."""

from __future__ import annotations

from tests.faults.training import ITERATIONS, Plan
from tests.nodes.conftest import StartAgents

HOLD, SAVED = 4, 3


def test_three_go_on_when_one_of_four_is_lost(on_nodes: StartAgents) -> None:
    flags = ("--nnodes=3:4", "--ft-node-timeout=6", "--ft-node-beat=0.5")
    agents = on_nodes(4, Plan(hold=HOLD), *flags, nproc=1, store_apart=True)
    cycle = agents.until_cycle_of(4)
    agents.until_train(HOLD, world=4, cycle=cycle)
    agents.lose(agents.node_of(0, cycle))
    agents.until_train(HOLD, world=3, cycle=cycle + 1)
    agents.go()
    agents.end_well()
    agents.trained((SAVED, 4), (ITERATIONS - SAVED, 3))
