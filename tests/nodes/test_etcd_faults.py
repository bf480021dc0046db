"""Jobs over a real etcd: whoever is lost, and whatever becomes of etcd for a while, others can go on."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_cluster import running_cluster
from tests.etcd_server import EtcdServer, running_etcd
from tests.faults.training import ITERATIONS, Plan, PlannedFault
from tests.nodes.conftest import StartAgents
from tests.nodes.test_store_load import ask

HOLD = 4
HELD = Plan(hold=HOLD)
TIMEOUT_S = 5
PAIR = ("--nnodes=2", f"--ft-node-timeout={TIMEOUT_S}", "--ft-node-beat=0.5")
PAIR_AND_SPARE = (*PAIR, "--ft-spares=1")
PATIENT = ("--nnodes=2", "--ft-node-timeout=15", "--ft-node-beat=0.5")
# A descriptor or a key that each replacement leaves shows after far fewer.
REPLACED = 30
STORE_LOST = 82


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    with running_etcd() as server:
        yield server


@pytest.fixture
def over(etcd: EtcdServer, tmp_path: Path) -> tuple[str, ...]:
    """The flags of a job over etcd."""
    conf = "join_timeout=60,last_call_timeout=1,read_timeout=20"
    endpoint = ("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoint}")
    return (*endpoint, f"--rdzv-id={tmp_path.name}", f"--rdzv-conf={conf}")


def test_the_node_of_rank_0_is_lost(on_loopback: StartAgents, over: tuple[str, ...]) -> None:
    """It had the ranks' store, and may have been the coordinator."""
    agents = on_loopback(3, HELD, *PAIR_AND_SPARE, *over)
    agents.until_train(HOLD, world=4)
    agents.lose(agents.node_of(0))
    agents.until_train(HOLD, world=4, cycle=1)
    agents.go()
    agents.end_well()
    agents.trained((ITERATIONS, 4))


def test_etcd_starts_again_and_stands_still_while_ranks_train(
    on_loopback: StartAgents, etcd: EtcdServer, over: tuple[str, ...]
) -> None:
    agents = on_loopback(2, HELD, *PATIENT, *over)
    agents.until_train(HOLD, world=4)
    etcd.restart()
    agents.stay(2)
    etcd.pause()
    agents.stay(3)
    etcd.resume()
    agents.stay(2)
    agents.go()
    agents.end(0, 0)
    agents.trained((ITERATIONS, 4))
    assert [agent.cycles for agent in agents] == [[0], [0]], agents.tail()


@pytest.mark.slow
def test_the_leader_of_an_etcd_cluster_stands_still(on_loopback: StartAgents, tmp_path: Path) -> None:
    with running_cluster() as cluster:
        endpoint = (f"--rdzv-endpoint={cluster.endpoints}", "--rdzv-backend=etcd-v3", f"--rdzv-id={tmp_path.name}")
        conf = "--rdzv-conf=join_timeout=60,last_call_timeout=1,read_timeout=10"
        plan = Plan((PlannedFault("SIGKILL", iteration=6, rank=3),), hold=HOLD)
        agents = on_loopback(2, plan, *PATIENT, *endpoint, conf, "--max-restarts=1")
        agents.until_train(HOLD, world=4)
        cluster.leader().pause()
        agents.stay(15)
        agents.go()
        agents.end(0, 0)
    agents.trained((ITERATIONS, 4))
    assert [agent.cycles for agent in agents] == [[0, 1], [0, 1]], agents.tail()


def test_all_agents_are_lost_and_started_again(on_loopback: StartAgents, over: tuple[str, ...]) -> None:
    """The record of the former ones is still in etcd; the new ones take over from it."""
    agents = on_loopback(2, HELD, *PAIR, *over)
    agents.until_train(HOLD, world=4)
    for agent in list(agents):
        agents.lose(agent)
    anew = [agents.back(agent) for agent in list(agents)]
    agents.until(lambda: all(agent.cycles for agent in anew), "a cycle of the new agents")
    agents.go()
    agents.end_well()
    agents.trained((ITERATIONS, 4))


def remove_record(etcd: EtcdServer, run_id: str) -> None:
    """Removes the record of a job, and nothing else of it."""
    key = base64.b64encode(f"/ft_launcher/{run_id}/state".encode()).decode()
    assert json.loads(ask(etcd, "v3/kv/deleterange", {"key": key}))["deleted"] == "1"


def test_the_record_alone_is_lost_and_is_written_again(
    on_loopback: StartAgents, etcd: EtcdServer, over: tuple[str, ...], tmp_path: Path
) -> None:
    plan = Plan((PlannedFault("SIGKILL", iteration=6, rank=1),), hold=HOLD)
    agents = on_loopback(2, plan, *PATIENT, *over, "--max-restarts=1", nproc=1)
    agents.until_train(HOLD, world=2)
    remove_record(etcd, tmp_path.name)
    agents.go()
    agents.end(0, 0)
    agents.trained((ITERATIONS, 2))
    assert [agent.cycles for agent in agents] == [[0, 1], [0, 1]], agents.tail()
    assert "writes it again" in agents[0].output + agents[1].output, agents.tail()


def test_etcd_that_has_lost_everything_ends_the_job(
    on_loopback: StartAgents, etcd: EtcdServer, over: tuple[str, ...]
) -> None:
    agents = on_loopback(2, HELD, *PATIENT, *over, nproc=1)
    agents.until_train(HOLD, world=2)
    etcd.forget()
    agents.end(STORE_LOST, STORE_LOST)
    for agent in agents:
        (end,) = agent.journal("job_end")
        assert end["reason"] == "the rendezvous' store has lost this job's records", agents.tail()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_node_of_rank_0_is_replaced_again_and_again(on_loopback: StartAgents, over: tuple[str, ...]) -> None:
    agents = on_loopback(3, HELD, *PAIR_AND_SPARE, *over)
    agents.until_train(HOLD, world=4)
    for cycle in range(REPLACED):
        lost = agents.node_of(0, cycle)
        agents.lose(lost)
        agents.until_train(HOLD, world=4, cycle=cycle + 1)
        agents.back(lost).until_event("job_start")
        agents.stay(1)
    agents.go()
    agents.end_well()
    agents.trained((ITERATIONS, 4))
