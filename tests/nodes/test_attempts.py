"""Jobs one after the other under one id, on a store that outlives them: each launch is an attempt of its own."""

from __future__ import annotations

import signal

from tests.faults.training import ITERATIONS, Plan, PlannedFault
from tests.nodes.agents import LOST, Agents
from tests.nodes.conftest import StartAgents

HOLD = 8
FLAGS = ("--nnodes=2", "--ft-node-timeout=6", "--ft-node-beat=0.5", "--max-restarts=0")
FAILED, PREEMPTED = 128 + signal.SIGKILL, 86


def begin(agents: Agents, cycle: int) -> None:
    """Two more launchers, which train up to the hold."""
    pair = [agents.join(node=number, nproc=1) for number in (0, 1)]
    agents.until(lambda: all(agent.cycles for agent in pair), "the cycle")
    agents.until_train(HOLD, world=2, cycle=cycle)
    assert [agent.cycles for agent in pair] == [[cycle], [cycle]], agents.tail()


def test_an_id_is_used_again_after_every_kind_of_end(on_loopback: StartAgents) -> None:
    """A failure, a preemption, SIGKILL of all and a success: the next launch trains, and has a budget of its own."""
    agents = on_loopback(
        2, Plan((PlannedFault("SIGKILL", iteration=4, rank=1),), hold=HOLD), *FLAGS, nproc=1, store_apart=True
    )
    codes = [FAILED, FAILED]
    agents.end(*codes)
    begin(agents, cycle=0)
    for agent in list(agents)[-2:]:
        agent.process.send_signal(signal.SIGTERM)
    codes += [PREEMPTED, PREEMPTED]
    agents.end(*codes)
    begin(agents, cycle=0)
    for agent in list(agents)[-2:]:
        agents.lose(agent)
    codes += [LOST, LOST]
    begin(agents, cycle=1)
    agents.go()
    codes += [0, 0]
    agents.end(*codes)
    agents.trained((ITERATIONS, 2))
    anew = [agents.join(node=number, nproc=1) for number in (0, 1)]
    agents.end(*codes, 0, 0)
    assert [agent.cycles for agent in anew] == [[0], [0]], agents.tail()
    assert "this is a new one" in anew[0].output + anew[1].output
