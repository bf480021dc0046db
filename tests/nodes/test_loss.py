"""Nodes are lost, come back, come late, come twice or cannot be heard: what the job makes of it.

The ranks hold at an iteration until the test lets them go, so that each fault happens in a training under way.
"""

from __future__ import annotations

import pytest

from tests.faults.training import ITERATIONS, Plan, PlannedFault
from tests.nodes.agents import LOST
from tests.nodes.conftest import StartAgents
from tests.nodes.slow_proxy import Line

HOLD = 4
SAVED = 3
TIMEOUT_S = 5
QUICK = (f"--ft-node-timeout={TIMEOUT_S}", "--ft-node-beat=0.5")
PAIR = ("--nnodes=2", *QUICK)
PAIR_AND_SPARE = (*PAIR, "--ft-spares=1")
ONE_OR_TWO = ("--nnodes=1:2", *QUICK)
HELD = Plan(hold=HOLD)
REFUSED = (2, 81)
STORE_LOST = 82
BELOW_MINIMUM = 84


# Loss.


@pytest.mark.slow  # as where it returns, and where its line is dead
def test_the_rest_goes_on_when_a_node_is_lost(on_nodes: StartAgents) -> None:
    agents = on_nodes(2, HELD, *ONE_OR_TWO)
    agents.until_train(HOLD, world=4)
    agents.lose(agents[1])
    agents.until_train(HOLD, world=2, cycle=1)
    agents.go()
    agents.end(0, LOST)
    agents.trained((SAVED, 4), (ITERATIONS - SAVED, 2))


@pytest.mark.parametrize(
    "number", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_two_of_three_go_on_whichever_is_lost(on_nodes: StartAgents, number: int) -> None:
    """One of the three led the others, and two may want to follow it at once."""
    agents = on_nodes(3, HELD, "--nnodes=2:3", *QUICK, store_apart=True)
    cycle = agents.until_cycle_of(3)
    agents.until_train(HOLD, world=6, cycle=cycle)
    agents.lose(agents[number])
    agents.until_train(HOLD, world=4, cycle=cycle + 1)
    agents.stay(TIMEOUT_S)
    agents.go()
    agents.end_well()
    agents.trained((SAVED, 6), (ITERATIONS - SAVED, 4))


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_spare_takes_the_place_of_a_lost_node(on_nodes: StartAgents, rank: int) -> None:
    """Of that of rank 0, too, where the store is elsewhere."""
    agents = on_nodes(3, HELD, *PAIR_AND_SPARE, store_apart=True)
    agents.until_train(HOLD, world=4)
    agents.lose(agents.node_of(rank))
    agents.until_train(HOLD, world=4, cycle=1)
    agents.go()
    agents.end_well()
    agents.trained((ITERATIONS, 4))


def test_a_spare_that_was_not_needed_ends_well(on_nodes: StartAgents) -> None:
    agents = on_nodes(3, HELD, *PAIR_AND_SPARE)
    agents.until_train(HOLD, world=4)
    for agent in agents:
        agent.until_event("job_start")
    agents.stay(TIMEOUT_S)
    agents.go()
    agents.end_well()
    agents.trained((ITERATIONS, 4))
    assert sorted(agent.cycles for agent in agents) == [[], [0], [0]], agents.tail()


def test_a_lost_node_that_returns_is_a_spare(on_nodes: StartAgents) -> None:
    agents = on_nodes(3, HELD, *PAIR_AND_SPARE, store_apart=True)
    agents.until_train(HOLD, world=4)
    lost = agents.node_of(2)
    agents.lose(lost)
    agents.until_train(HOLD, world=4, cycle=1)
    returned = agents.back(lost)
    returned.until_event("job_start")
    agents.stay(TIMEOUT_S)
    agents.lose(agents.node_of(2, cycle=1))
    agents.until_train(HOLD, world=4, cycle=2)
    agents.go()
    agents.end_well()
    agents.trained((ITERATIONS, 4))
    assert returned.cycles == [2], agents.tail()


def test_a_lost_node_that_returns_where_there_is_room_takes_part(on_nodes: StartAgents) -> None:
    agents = on_nodes(2, HELD, *ONE_OR_TWO)
    agents.until_train(HOLD, world=4)
    agents.lose(agents[1])
    agents.until_train(HOLD, world=2, cycle=1)
    returned = agents.back(agents[1])
    agents.until_train(HOLD, world=4, cycle=2)
    agents.go()
    agents.end_well()
    agents.trained((ITERATIONS, 4))
    assert returned.cycles == [2], agents.tail()


@pytest.mark.slow
def test_the_loss_of_a_spare_ends_nothing(on_nodes: StartAgents) -> None:
    agents = on_nodes(3, HELD, *PAIR_AND_SPARE, store_apart=True)
    agents.until_train(HOLD, world=4)
    (spare,) = (agent for agent in agents if not agent.cycles)
    agents.lose(spare)
    agents.stay(2 * TIMEOUT_S)
    agents.go()
    agents.end_well()
    agents.trained((ITERATIONS, 4))


@pytest.mark.slow
def test_nodes_are_lost_and_return_in_turn(on_nodes: StartAgents) -> None:
    agents = on_nodes(3, HELD, *PAIR_AND_SPARE, store_apart=True)
    agents.until_train(HOLD, world=4)
    for cycle in range(6):
        lost = agents.node_of(rank=2 * (cycle % 2), cycle=cycle)
        agents.lose(lost)
        agents.until_train(HOLD, world=4, cycle=cycle + 1)
        agents.back(lost).until_event("job_start")
        agents.stay(TIMEOUT_S)
    agents.go()
    agents.end_well()
    agents.trained((ITERATIONS, 4))


# Who comes.


def test_a_late_agent_of_an_old_cycle_cannot_act(on_nodes: StartAgents) -> None:
    """It stood still, was given up, and wakes while others train in its place."""
    agents = on_nodes(3, HELD, *PAIR_AND_SPARE, "--ft-node-timeout=6", store_apart=True)
    agents.until_train(HOLD, world=4)
    late = agents.node_of(2)
    late.pause()
    agents.until_train(HOLD, world=4, cycle=1)
    late.resume()
    agents.until(lambda: not late.ranks_alive(0), "the end of the old cycle's ranks")
    agents.stay(TIMEOUT_S)
    agents.go()
    agents.end_well()
    agents.trained((ITERATIONS, 4))
    assert late.cycles == [0], agents.tail()


def test_an_agent_of_another_job_is_turned_away(on_nodes: StartAgents) -> None:
    agents = on_nodes(2, HELD, *PAIR)
    agents.until_train(HOLD, world=4)
    stranger = agents.join("--rdzv-id=another", "--rdzv-conf=join_timeout=3")
    code = stranger.finish()
    assert code in REFUSED, agents.tail()
    assert "holds the job 'job', this one is 'another'" in stranger.journal("job_end")[0]["reason"], agents.tail()
    agents.go()
    agents.end(0, 0, code)
    agents.trained((ITERATIONS, 4))
    assert [agent.cycles for agent in agents] == [[0], [0], []], agents.tail()


def test_nodes_may_differ_in_their_number_of_ranks(on_nodes: StartAgents) -> None:
    agents = on_nodes(1, Plan((PlannedFault("SIGKILL", rank=2),)), *PAIR, "--max-restarts=1", nproc=2)
    agents.join(nproc=1)
    agents.end(0, 0)
    agents.trained((ITERATIONS, 3))
    assert agents.faults() == [("signal", 2, 0)], agents.tail()


def test_two_agents_join_at_once(on_nodes: StartAgents) -> None:
    agents = on_nodes(1, HELD, "--nnodes=1:3", *QUICK)
    agents.until_train(HOLD, world=2)
    agents.join()
    agents.join()
    last = agents.until_cycle_of(3)
    agents.until_train(HOLD, world=6, cycle=last)
    agents.go()
    agents.end(0, 0, 0)
    agents.trained((SAVED, 2), (ITERATIONS - SAVED, 6), ranks=range(2))
    agents.trained((ITERATIONS, 6), ranks=range(4, 6))
    assert {agent.cycles[-1] for agent in agents} == {last}, agents.tail()


# The network and the store.


def test_a_node_behind_a_cut_stops_before_others_take_its_place(on_nodes: StartAgents) -> None:
    agents = on_nodes(3, HELD, *PAIR_AND_SPARE, store_apart=True)
    agents.until_train(HOLD, world=4)
    parted = agents.node_of(2)
    agents.cut(parted)
    agents.until(lambda: any(agent.event("cycle_start", cycle=1) for agent in agents), "the next cycle")
    assert not parted.ranks_alive(0), f"two groups at once\n{agents.tail()}"
    agents.until_train(HOLD, world=4, cycle=1)
    agents.heal(parted)
    agents.go()
    code = parted.finish()
    assert code in (0, STORE_LOST, BELOW_MINIMUM), agents.tail()
    agents.end(*(code if agent is parted else 0 for agent in agents))
    agents.trained((ITERATIONS, 4))
    assert parted.cycles == [0], agents.tail()


def test_a_cut_that_heals_in_time_ends_nothing(on_nodes: StartAgents) -> None:
    agents = on_nodes(2, HELD, "--nnodes=2", "--ft-node-timeout=8", "--ft-node-beat=0.5")
    agents.until_train(HOLD, world=4)
    agents.cut(agents[1])
    agents.stay(2)
    agents.heal(agents[1])
    agents.stay(8)
    agents.go()
    agents.end(0, 0)
    agents.trained((ITERATIONS, 4))
    assert [agent.cycles for agent in agents] == [[0], [0]], agents.tail()


@pytest.mark.slow
def test_nodes_that_cannot_hear_each_other_but_the_store_train_on(on_nodes: StartAgents) -> None:
    """These ranks need no network: who beats is alive."""
    agents = on_nodes(2, HELD, *PAIR, store_apart=True)
    agents.until_train(HOLD, world=4)
    assert agents.network is not None
    agents.network.drop("n0", "n1")
    agents.stay(2 * TIMEOUT_S)
    agents.go()
    agents.end(0, 0)
    agents.trained((ITERATIONS, 4))


@pytest.mark.slow
def test_the_loss_of_the_stores_node_ends_every_agent(on_nodes: StartAgents) -> None:
    agents = on_nodes(2, HELD, *PAIR, store_apart=True)
    agents.until_train(HOLD, world=4)
    agents.site.lose_store()
    agents.end(STORE_LOST, STORE_LOST)
    reasons = [line["reason"] for agent in agents for line in agent.journal("job_end")]
    assert ["store" in reason for reason in reasons] == [True, True], agents.tail()


def test_the_loss_of_the_node_that_hosts_the_store_ends_the_others(on_nodes: StartAgents) -> None:
    agents = on_nodes(3, HELD, "--nnodes=3", *QUICK)
    agents.until_train(HOLD, world=6)
    agents.lose(agents[0])
    agents.end(LOST, STORE_LOST, STORE_LOST)


def test_a_killed_store_ends_every_agent(on_loopback: StartAgents) -> None:
    """Its connections are closed, so that nobody has to wait for silence."""
    agents = on_loopback(2, HELD, *PAIR, store_apart=True)
    agents.until_train(HOLD, world=4)
    agents.site.lose_store()
    agents.end(STORE_LOST, STORE_LOST)


@pytest.mark.parametrize("step_s", [30.0, pytest.param(-30.0, marks=pytest.mark.slow)])
def test_a_stepped_clock_ends_nothing(on_nodes: StartAgents, step_s: float) -> None:
    plan = Plan((PlannedFault("SIGKILL", iteration=6, rank=3),), hold=HOLD)
    agents = on_nodes(2, plan, *PAIR, "--max-restarts=1", own_clocks=(1,))
    agents.until_train(HOLD, world=4)
    agents.site.clocks[1].step(step_s)
    agents.stay(2 * TIMEOUT_S)
    agents.go()
    agents.end(0, 0)
    agents.trained((ITERATIONS, 4))
    assert [agent.cycles for agent in agents] == [[0, 1], [0, 1]], agents.tail()
    here, there = (agent.journal("job_end")[0]["t"] for agent in agents)
    assert abs(there - here - step_s) < abs(step_s) / 2, "the clock was not stepped"


def test_a_slow_line_with_losses_to_the_store_ends_nothing(on_nodes: StartAgents) -> None:
    """The limit leaves room for losses one after the other: each holds up all that comes behind it."""
    plan, flags = Plan((PlannedFault("SIGKILL", rank=3),)), ("--nnodes=2", "--ft-node-timeout=10", "--max-restarts=1")
    agents = on_nodes(2, plan, *flags, line=Line(delay_s=0.1, loss=0.05), store_apart=True)
    agents.end(0, 0)
    agents.trained((ITERATIONS, 4))
    assert [agent.cycles for agent in agents] == [[0, 1], [0, 1]], agents.tail()


@pytest.mark.slow
def test_a_line_to_the_store_that_breaks_once_ends_nothing(on_nodes: StartAgents) -> None:
    agents = on_nodes(2, HELD, *PAIR, line=Line(), store_apart=True)
    agents.until_train(HOLD, world=4)
    agents.site.proxies[1].drop()
    agents.stay(2 * TIMEOUT_S)
    agents.go()
    agents.end(0, 0)
    agents.trained((ITERATIONS, 4))


def test_a_node_whose_line_to_the_store_is_dead_is_lost(on_nodes: StartAgents) -> None:
    agents = on_nodes(2, HELD, *ONE_OR_TWO, line=Line(), store_apart=True)
    agents.until_train(HOLD, world=4)
    agents.site.proxies[1].stall()
    agents.until_train(HOLD, world=2, cycle=1)
    assert not agents[1].ranks_alive(0), f"two groups at once\n{agents.tail()}"
    agents.go()
    assert agents[1].finish() in (STORE_LOST, BELOW_MINIMUM), agents.tail()
    agents.end(0, agents[1].finish())
    agents.trained((SAVED, 4), (ITERATIONS - SAVED, 2))
