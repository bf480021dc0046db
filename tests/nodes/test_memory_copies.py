"""State in memory on other nodes: a node is lost with all that it had in memory, and no step more than since the last
copy is lost. Nodes are network namespaces, and each has a memory of its own."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rank_monitor.contract.copy_records import copies_name
from rank_monitor.contract.memory_files import complete_steps
from rank_monitor.contract.processes import tmpfs
from tests.faults.test_memory_checkpoint import EVERY, FLAGS, NEEDS_FSDP, WORKER, write_plan
from tests.faults.training import Plan
from tests.nodes.agents import Agent, Agents
from tests.nodes.conftest import StartAgents
from tests.nodes.job_site import node_name
from tests.patience import until

SHM = Path("/dev/shm")
WAITS = 22
"""The step after which the ranks of the first cycle wait for the test."""
SAVED = WAITS - WAITS % EVERY
BUDDIES = ("--ft-memory-buddies=1", "--ft-node-timeout=6", "--ft-node-beat=0.5", *FLAGS)


class Memories:
    """A folder in a tmpfs for each node."""

    def __init__(self, top: Path) -> None:
        self.top = top

    def flag(self, node: int) -> str:
        folder = self.top / node_name(node)
        folder.mkdir(exist_ok=True)
        return f"--ft-memory-dir={folder}"

    def job_folder(self, node: int) -> Path:
        (folder,) = (self.top / node_name(node)).iterdir()
        return folder

    def steps(self, node: int, world: int, ranks: list[int]) -> set[int]:
        """The steps of some ranks of which a node has a copy."""
        folder = self.job_folder(node) / copies_name(world, ranks)
        return complete_steps(path.name for path in folder.iterdir()) if folder.is_dir() else set()

    def holder(self, nodes: list[int], world: int, ranks: list[int]) -> int | None:
        """The node that has a copy of the last save of some ranks; None: none has."""
        return next((node for node in nodes if SAVED in self.steps(node, world, ranks)), None)


@pytest.fixture
def memories() -> Iterator[Memories]:
    if not SHM.is_dir() or tmpfs.kind_of(str(SHM)) != tmpfs.KIND:
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir=SHM) as top:
        yield Memories(Path(top))


def begin(on_nodes: StartAgents, memories: Memories, *flags: str, nodes: int, nproc: int = 2, **more: Any) -> Agents:
    """A job whose active nodes have saved and copied a step, and wait. `more`: flags of single nodes."""
    agents = on_nodes(0, Plan(), *BUDDIES, *flags, store_apart=True, script=WORKER)
    for node in range(nodes):
        agents.join(memories.flag(node), *more.get(f"node{node}", ()), nproc=nproc)
    return agents


def plan_of(folder: Path, kind: str, world: int) -> None:
    write_plan(folder, [(0, WAITS, list(range(world)), "waits_for_the_test")], kind=kind)


def until_active(agents: Agents, nodes: int) -> None:
    """Waits until so many of the nodes have begun a cycle."""
    agents.until(lambda: sum(agent.event("cycle_start") is not None for agent in agents) == nodes, "a cycle")


def until_copied(agents: Agents, memories: Memories, nodes: list[int], parts: list[list[int]]) -> list[int]:
    """Waits until each node's ranks have a copy of the last save; who has them, by node."""
    world = sum(len(part) for part in parts)

    def holders() -> list[int] | None:
        found = [memories.holder(nodes, world, part) for part in parts]
        return None if None in found else found  # type: ignore[return-value]

    found = agents.until(holders, "the copies", 120)
    assert found is not None
    return found


def ends(agents: Agents, world: int, start: int = SAVED) -> None:
    """The job ends well, its last ranks went on from a step, and have the weights of a job without faults."""
    (agents.folder / "go").touch()
    agents.end_well(120)
    for rank in range(world):
        found = json.loads((agents.folder / f"end-{rank}").read_text())
        found.pop("sizes")
        assert found == {"start": start, "same": True}, agents.tail()


def fetched(agent: Agent) -> dict[str, Any]:
    (event,) = agent.journal("memory_fetched")
    return event


# Sums of four ranks' gradients differ in their last bits before and after DDP forms its buckets anew, and so a restart
# shows; those of two ranks are the same in any order.
@pytest.mark.parametrize(("kind", "nproc"), [("ddp", 1), pytest.param("fsdp", 2, marks=NEEDS_FSDP)])
def test_a_spare_fetches_the_state_of_the_node_whose_place_it_takes(
    on_nodes: StartAgents, memories: Memories, tmp_path: Path, kind: str, nproc: int
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex())
    secret.chmod(0o600)
    plan_of(tmp_path, kind, 2 * nproc)
    flags = ("--nnodes=2:2", "--ft-spares=1", f"--ft-job-secret-file={secret}")
    agents = begin(on_nodes, memories, *flags, nodes=3, nproc=nproc)
    until_active(agents, 2)
    first, second = agents.node_of(0), agents.node_of(nproc)
    (spare,) = [agent for agent in agents if agent not in (first, second)]
    active = [first.number, second.number]
    parts = [list(range(nproc)), list(range(nproc, 2 * nproc))]
    holders = until_copied(agents, memories, active, parts)
    assert holders == [second.number, first.number], "each has the copy of the other"
    agents.lose(second)
    ends(agents, 2 * nproc)
    event = fetched(spare)
    assert (event["step"], event["peer"], event["reason"]) == (SAVED, node_name(first.number), "")
    assert not first.journal("memory_fetched")
    (loaded,) = spare.journal("memory_loaded")
    assert (loaded["tier"], loaded["step"]) == ("buddy", SAVED)
    assert loaded["steps_lost"] in range(WAITS - SAVED + 1), "the copy may be there before the steps after it are done"
    assert f"fetched step {SAVED} (" in spare.output
    assert not first.journal("memory_not_copied"), first.tail()
    copied = first.journal("memory_copied")
    assert {each["peer"] for each in copied} == {node_name(second.number), node_name(spare.number)}


def test_a_node_that_comes_back_without_its_memory(on_nodes: StartAgents, memories: Memories, tmp_path: Path) -> None:
    plan_of(tmp_path, "ddp", 2)
    agents = begin(on_nodes, memories, "--nnodes=2:2", nodes=2, nproc=1)
    until_active(agents, 2)
    until_copied(agents, memories, [0, 1], [[0], [1]])
    lost = agents.node_of(1)
    agents.lose(lost)
    until(lambda: not lost.processes(), "its end")
    memories.top.joinpath(node_name(lost.number)).rename(memories.top / "lost")
    back = agents.back(lost, memories.flag(lost.number))
    ends(agents, 2)
    assert fetched(back)["step"] == SAVED


def test_copies_go_over_a_network_that_loses_packets(on_nodes: StartAgents, memories: Memories, tmp_path: Path) -> None:
    plan_of(tmp_path, "ddp", 2)
    agents = begin(on_nodes, memories, "--nnodes=2:2", "--ft-spares=1", nodes=3, nproc=1)
    for node in range(3):
        agents.network.lose_packets(node_name(node), 5)
    until_active(agents, 2)
    first, second = agents.node_of(0), agents.node_of(1)
    until_copied(agents, memories, [first.number, second.number], [[0], [1]])
    agents.lose(second)
    ends(agents, 2)


@NEEDS_FSDP
def test_copies_of_four_nodes_go_to_the_other_rack(on_nodes: StartAgents, memories: Memories, tmp_path: Path) -> None:
    """Both nodes of a rack are lost: as many spares fetch all that they had."""
    plan_of(tmp_path, "fsdp", 4)
    racks = {f"node{node}": (f"--ft-node-group=rack{node % 2}",) for node in range(6)}
    flags = ("--nnodes=4:4", "--ft-spares=2")
    agents = begin(on_nodes, memories, *flags, nodes=4, nproc=1, **racks)
    until_active(agents, 4)
    active = [agents.node_of(rank) for rank in range(4)]
    for spare in (4, 5):
        agents.join(memories.flag(spare), *racks[f"node{spare}"], nproc=1)
    holders = until_copied(agents, memories, [agent.number for agent in active], [[0], [1], [2], [3]])
    for rank, agent in enumerate(active):
        assert holders[rank] % 2 != agent.number % 2, "the copy is in the other rack"
    assert len(set(holders)) == 4, "each keeps one copy"
    rack = [agent for agent in active if agent.number % 2 == 1]
    for agent in rack:
        agents.lose(agent)
    ends(agents, 4)
    spares = [agent for agent in agents if agent not in active]
    assert [len(agent.journal("memory_fetched")) for agent in spares] == [1] * len(rack)


@NEEDS_FSDP
def test_a_node_and_its_buddy_are_lost(on_nodes: StartAgents, memories: Memories, tmp_path: Path) -> None:
    """Nobody has the state of the first one: the job goes on from its checkpoint on disk, here from nothing."""
    plan_of(tmp_path, "fsdp", 3)
    agents = begin(on_nodes, memories, "--nnodes=3:3", "--ft-spares=2", nodes=5, nproc=1)
    until_active(agents, 3)
    active = [agents.node_of(rank) for rank in range(3)]
    until_copied(agents, memories, [agent.number for agent in active], [[0], [1], [2]])
    for agent in active[1:]:
        agents.lose(agent)
    ends(agents, 3, start=0)
    assert not any(agent.journal("memory_fetched") for agent in agents)


def test_nodes_with_different_secrets_copy_nothing_and_train(
    on_nodes: StartAgents, memories: Memories, tmp_path: Path
) -> None:
    files = {}
    for node in range(2):
        path = tmp_path / f"secret{node}"
        path.write_text(secrets.token_hex())
        path.chmod(0o600)
        files[f"node{node}"] = (f"--ft-job-secret-file={path}",)
    plan_of(tmp_path, "ddp", 2)
    agents = begin(on_nodes, memories, "--nnodes=2:2", nodes=2, nproc=1, **files)
    for agent in agents:
        agent.until_event("memory_not_copied", 120)
    ends(agents, 2, start=0)
    for agent in agents:
        assert (
            "is not copied to" in agent.output
            and "has another secret in --ft-job-secret-file, or its process has died" in agent.output
        )
        assert not agent.journal("memory_copied")
