"""What each node says on its console at a fault and at the end: the same story, with the culprit's node and rank."""

from __future__ import annotations

import socket

import pytest

from tests.faults.training import Plan, PlannedFault
from tests.nodes.agents import LOST
from tests.nodes.conftest import StartAgents

STORE_LOST = 82
HOLD = 4


@pytest.mark.parametrize(
    ("restarts", "code", "follows"),
    [
        (0, 1, "next: give up - no restarts allowed (--max-restarts 0); exit code 1"),
        (1, 0, "next: restart - restart 1 of 1, 0 left"),
    ],
)
def test_every_node_names_the_culprit_and_what_follows(
    on_loopback: StartAgents, restarts: int, code: int, follows: str
) -> None:
    plan = Plan((PlannedFault("exception", "step", 2, rank=3),))
    # The spare may come when the job is over; a store apart tells it of the end then.
    agents = on_loopback(3, plan, "--nnodes=2", "--ft-spares=1", f"--max-restarts={restarts}", store_apart=True)
    agents.end(code, code, code)
    culprit = f"ft_launcher: rank 3 on {socket.gethostname()} raised "
    for agent in agents:
        assert "forms anew" not in agent.output, agents.tail()
        if agent.cycles:
            assert (agent.output.count(culprit), agent.output.count(follows)) == (1, 1), agents.tail()
        elif code:
            reason = follows.removeprefix("next: give up - ")
            assert f"ft_launcher: the job ends here: {reason}" in agent.output, agents.tail()


def test_the_loss_of_the_stores_host_is_said_once(on_loopback: StartAgents) -> None:
    flags = ("--nnodes=3", "--ft-node-timeout=6", "--ft-node-beat=0.5")
    agents = on_loopback(3, Plan(hold=HOLD), *flags, nproc=1)
    agents.until_train(HOLD, world=3)
    agents.lose(agents[0])
    agents.end(LOST, STORE_LOST, STORE_LOST)
    for agent in list(agents)[1:]:
        assert agent.output.count("ft_launcher: the job ends here: ") == 1, agents.tail()
        assert agent.output.count("the rendezvous' store refuses ") <= 1, agents.tail()
        for noise in ("frame #", "TCPStore.cpp", "forms anew"):
            assert noise not in agent.output, agents.tail()
