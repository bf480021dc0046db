"""A node whose launcher stands still: its monitors end its ranks before the others may go on without it.

Standing still is not dying: every socket of a stopped process still accepts, and none of them closes.
"""

from __future__ import annotations

import signal

import pytest

from tests.faults.job import kill
from tests.faults.training import ITERATIONS, Plan
from tests.nodes.agents import Agent, Agents
from tests.nodes.conftest import StartAgents

HOLD = 4
HELD = Plan(hold=HOLD)
ONE_OR_TWO = ("--nnodes=1:2", "--ft-node-timeout=6", "--ft-node-beat=1")


def begin(start: StartAgents) -> tuple[Agents, int]:
    """Two nodes that train, of which one is enough, and the number of their cycle: one may have begun alone."""
    agents = start(2, HELD, *ONE_OR_TWO, nproc=1, store_apart=True)
    cycle = agents.until_cycle_of(2)
    agents.until_train(HOLD, world=2, cycle=cycle)
    return agents, cycle


def until_the_other_goes_on(agents: Agents, frozen: Agent, cycle: int) -> None:
    """Waits for the cycle without this node; no rank of its own may live by then."""
    agents.until(lambda: any(agent.event("cycle_start", cycle=cycle + 1) for agent in agents), "the next cycle")
    assert not frozen.ranks_alive(cycle), f"two groups at once\n{agents.tail()}"
    agents.until_train(HOLD, world=1, cycle=cycle + 1)


def says_so_and_takes_part_again(agents: Agents, frozen: Agent, cycle: int) -> None:
    """It finds its ranks ended, tells it, and comes as a newcomer does: there is room for it."""
    fenced = frozen.until_event("fenced", cycle=cycle)
    assert fenced["ranks"] == sorted(frozen.global_ranks(cycle)), agents.tail()
    assert fenced["silent_s"] >= fenced["limit_s"] > 0, agents.tail()
    agents.until(lambda: "its monitors ended the ranks of this node" in frozen.output, "the line of it")
    agents.until_train(HOLD, world=2, cycle=cycle + 2)
    agents.go()
    agents.end(0, 0)
    states = [agents[0].state(rank) for rank in range(2)]
    assert [state.iteration for state in states if state] == [ITERATIONS] * 2, agents.tail()
    assert frozen.cycles[-2:] == [cycle, cycle + 2] and agents.faults() == [], agents.tail()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_only_the_launcher_stands_still(on_loopback: StartAgents, rank: int) -> None:
    """One of the two coordinates, and the other takes over from it."""
    agents, cycle = begin(on_loopback)
    frozen = agents.node_of(rank, cycle)
    kill(frozen.process.pid, signal.SIGSTOP)
    until_the_other_goes_on(agents, frozen, cycle)
    kill(frozen.process.pid, signal.SIGCONT)
    says_so_and_takes_part_again(agents, frozen, cycle)


def test_ranks_that_were_stopped_do_not_train_on(on_loopback: StartAgents) -> None:
    """All of the node stood still. The launcher is the last to go on, so that only the monitors can end the ranks."""
    agents, cycle = begin(on_loopback)
    frozen = agents.node_of(1, cycle)
    ranks = frozen.ranks_alive(cycle)
    frozen.pause()
    agents.until_train(HOLD, world=1, cycle=cycle + 1)
    assert frozen.ranks_alive(cycle) == ranks, "a stopped process does nothing"
    for pid in frozen.processes().keys() - {frozen.process.pid}:
        kill(pid, signal.SIGCONT)
    agents.until(lambda: not frozen.ranks_alive(cycle), "the end of the old cycle's ranks")
    kill(frozen.process.pid, signal.SIGCONT)
    says_so_and_takes_part_again(agents, frozen, cycle)


@pytest.mark.slow
def test_the_whole_node_is_stopped_and_goes_on(on_loopback: StartAgents) -> None:
    """Launcher, monitors and ranks wake together: the launcher must not renew what has run out."""
    agents, cycle = begin(on_loopback)
    frozen = agents.node_of(1, cycle)
    frozen.pause()
    agents.until_train(HOLD, world=1, cycle=cycle + 1)
    frozen.resume()
    agents.until(lambda: not frozen.ranks_alive(cycle), "the end of the old cycle's ranks")
    says_so_and_takes_part_again(agents, frozen, cycle)


@pytest.mark.slow
def test_a_short_stop_ends_nothing(on_loopback: StartAgents) -> None:
    """Of half the limit, twice: the second one's time begins anew."""
    agents = on_loopback(2, HELD, "--nnodes=2", "--ft-node-timeout=8", "--ft-node-beat=0.5", store_apart=True)
    agents.until_train(HOLD, world=4)
    for _ in range(2):
        kill(agents[1].process.pid, signal.SIGSTOP)
        agents.stay(3.5)
        kill(agents[1].process.pid, signal.SIGCONT)
        agents.stay(1.5)
    agents.go()
    agents.end(0, 0)
    agents.trained((ITERATIONS, 4))
    assert [agent.cycles for agent in agents] == [[0], [0]], agents.tail()


@pytest.mark.slow
def test_the_launcher_that_hosts_the_store_stands_still(on_loopback: StartAgents) -> None:
    """The others end, since nobody answers them; its own ranks do not train on alone."""
    agents = on_loopback(2, HELD, "--nnodes=2", "--ft-node-timeout=6", "--ft-node-beat=1", nproc=1)
    agents.until_train(HOLD, world=2)
    kill(agents[0].process.pid, signal.SIGSTOP)
    assert agents[1].finish() == 82, agents.tail()
    agents.until(lambda: not agents[0].ranks_alive(0), "the end of the old cycle's ranks")
    kill(agents[0].process.pid, signal.SIGCONT)
    agents[0].until_event("fenced", cycle=0)
    agents[0].process.send_signal(signal.SIGTERM)
    agents.end(86, 82)
