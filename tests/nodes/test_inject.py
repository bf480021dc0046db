"""The network of a node is cut on purpose, from inside: that node ends by itself, and the others go on without it."""

from __future__ import annotations

import pytest

from tests.faults.training import ITERATIONS, Plan
from tests.nodes.conftest import StartAgents

HOLD, SAVED = 4, 3
STORE_LOST, BELOW_MINIMUM = 82, 84
QUICK = ("--nnodes=1:2", "--ft-node-timeout=6", "--ft-node-beat=0.5")
FAULT = "node:1,kind:cut_network,interface:eth0,step:3"


@pytest.mark.slow
def test_a_node_cuts_itself_off(on_nodes: StartAgents) -> None:
    agents = on_nodes(2, Plan(hold=HOLD), *QUICK, f"--ft-inject={FAULT}", "--max-restarts=3", store_apart=True)
    agents.until_train(HOLD, world=2, cycle=1)
    cut = agents.node_of(2)
    agents.go()
    code = cut.finish()
    assert code in (STORE_LOST, BELOW_MINIMUM), agents.tail()
    agents.end(*(code if agent is cut else 0 for agent in agents))
    agents.trained((SAVED, 4), (ITERATIONS - SAVED, 2))
    (told,) = cut.journal("fault_on_purpose")
    assert (told["fault"], told["rank"], told["cycle"]) == (FAULT, 2, 0)
    assert cut.cycles == [0]
