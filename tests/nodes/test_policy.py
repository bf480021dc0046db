"""The restart policy on several nodes: min-healthy, and what a rank may ask for."""

from __future__ import annotations

from pathlib import Path

from tests.faults.training import ITERATIONS, Plan, PlannedFault
from tests.nodes import lone_worker
from tests.nodes.agents import Agent
from tests.nodes.conftest import StartAgents

HOLD, SAVED = 4, 3
EXCLUDED = 94
STOPPED = 95
QUICK = ("--ft-node-timeout=5", "--ft-node-beat=0.5")


def decides_on(node: Agent, *actions: str) -> None:
    """The decisions in the journal of a node are about these requests of rank 3, and say what they were made of."""
    found = [line["inputs"]["request"] for line in node.journal("decision")]
    assert found == [{"rank": 3, "action": action, "description": "injected on purpose"} for action in actions]


def test_with_min_healthy_the_cycle_goes_on_until_too_few_nodes_are_well(on_loopback: StartAgents) -> None:
    flags = ("--nnodes=1:2", *QUICK, "--ft-restart-policy=min-healthy", "--max-restarts=2")
    agents = on_loopback(2, Plan(), *flags, script=Path(lone_worker.__file__))
    cycle = agents.until_cycle_of(2)
    for ill in (agents[1], agents[0]):
        assert len(ill.ranks_alive(cycle)) == 2, agents.tail()
        (agents.folder / lone_worker.fail_file(cycle, min(ill.global_ranks(cycle)))).touch()
        agents.until(lambda ill=ill: not ill.ranks_alive(cycle), "the end of its ranks")
        if ill is agents[1]:
            agents.stay(1)
    agents.until(lambda: all(agent.event("cycle_start", cycle=cycle + 1) for agent in agents), "the next cycle")
    (agents.folder / lone_worker.END).touch()
    agents.end(0, 0)


def test_with_min_healthy_a_lost_node_costs_one_restart(on_loopback: StartAgents) -> None:
    """A node that comes while the others are enough takes part once they are not, and interrupts nobody before."""
    flags = ("--nnodes=2:3", *QUICK, "--ft-restart-policy=min-healthy", "--max-restarts=2")
    agents = on_loopback(2, Plan(), *flags, nproc=1, script=Path(lone_worker.__file__))
    cycle = agents.until_cycle_of(2)
    agents.join(nproc=1).until_event("job_start")
    agents.stay(3)
    agents.lose(agents[1])
    agents.until(lambda: agents[2].event("cycle_start", cycle=cycle + 1, nodes=2), "the next cycle")
    agents.join(nproc=1).until_event("job_start")
    agents.stay(3)
    (agents.folder / lone_worker.END).touch()
    agents.end_well()
    assert [agent.cycles for agent in agents] == [[0, 1], [0], [1], []], agents.tail()


def test_a_node_that_is_done_waits_for_the_others_so_long_and_leaves_them_at_work(on_loopback: StartAgents) -> None:
    """It hosts no store: the node of rank 0, which hosts that of the ranks, would stay as long as they run."""
    flags = ("--nnodes=2", *QUICK, "--ft-exit-barrier-timeout=1")
    agents = on_loopback(2, Plan(), *flags, store_apart=True, script=Path(lone_worker.__file__))
    agents.until_cycle_of(2)
    early, late = agents.node_of(3), agents.node_of(0)
    for rank in early.global_ranks(0):
        (agents.folder / lone_worker.done_file(rank)).touch()
    agents.until(lambda: early.process.poll() is not None, "the end of the node that is done")
    assert "the other nodes were not done within 1 s (--ft-exit-barrier-timeout)" in early.output, agents.tail()
    agents.stay(4)
    assert len(late.ranks_alive(0)) == 2, agents.tail()
    (agents.folder / lone_worker.END).touch()
    agents.end(0, 0)
    assert [agent.cycles for agent in agents] == [[0], [0]], agents.tail()


def test_a_rank_has_its_node_excluded_and_the_spare_takes_its_place(on_loopback: StartAgents) -> None:
    plan = Plan((PlannedFault("ask to leave", iteration=6, rank=3),), hold=HOLD)
    agents = on_loopback(3, plan, "--nnodes=2", "--ft-spares=1", *QUICK, store_apart=True)
    agents.until_train(HOLD, world=4)
    leaves = agents.node_of(3)
    for agent in agents:
        agent.until_event("job_start")
    agents.stay(1)
    agents.go()
    agents.end(*(EXCLUDED if agent is leaves else 0 for agent in agents))
    agents.trained((ITERATIONS, 4))
    assert leaves.cycles == [0], agents.tail()
    decides_on(leaves, "exclude_this_node")
    assert [line["reason"] for line in leaves.journal("job_end")] == ["rank 3 asked for it: injected on purpose"]


def test_a_rank_ends_the_job_on_all_nodes(on_loopback: StartAgents) -> None:
    plan = Plan((PlannedFault("ask for the end", iteration=6, rank=3),))
    agents = on_loopback(2, plan, "--nnodes=2", *QUICK, "--max-restarts=1")
    agents.end(STOPPED, STOPPED)
    decides_on(agents.node_of(3), "stop_job")
    assert [agent.cycles for agent in agents] == [[0], [0]], agents.tail()


def test_a_rank_has_all_nodes_restart(on_loopback: StartAgents) -> None:
    """Each node records one end of each cycle, also the one whose rank asked, which does so before the others."""
    plan = Plan(tuple(PlannedFault("ask for a restart", iteration=number, rank=3) for number in (4, 6)))
    agents = on_loopback(2, plan, "--nnodes=2", *QUICK, "--max-restarts=0")
    agents.end(0, 0)
    asks = agents.node_of(3)
    decides_on(asks, "restart", "restart")
    for agent in agents:
        assert agent.cycles == [0, 1, 2], agents.tail()
        assert [line["cycle"] for line in agent.journal("cycle_end")] == [0, 1, 2], agents.tail()
    assert [line["how"] for line in asks.journal("cycle_end")] == ["asked for: restart"] * 2 + ["succeeded"]
