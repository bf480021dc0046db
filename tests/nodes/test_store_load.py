"""What nodes ask of the job's store, to form a cycle and while nothing happens, by its own count if it has one.

The nodes are threads of this process with real stores. `python -m scripts.bench P11` forms cycles of up to 1,024.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from ft_launcher.job.coordinator.formation import Rules, Size
from ft_launcher.job.coordinator.node_messages import EndReason
from ft_launcher.job.link.attempt import NodeSettings
from ft_launcher.job.link.lease import Lease
from ft_launcher.job.link.questions import Topic
from ft_launcher.job.rendezvous.cycle_store import PortHolder
from ft_launcher.job.rendezvous.handler import NodeRendezvous
from ft_launcher.job.store.store_connection import open_job_store
from rank_monitor.contract.processes.wait import readable
from scripts.bench import simulated_nodes
from tests.etcd_server import EtcdServer, running_etcd
from tests.ft_launcher.job.nodes_of_a_test import judge, node
from tests.patience import until
from tests.ports import free_port

BEAT_S, BEATS = 0.5, 8
MAX_TO_FORM = 14
"""Operations of a node, with its share of the coordinator's: 12.7 on a calm machine, and one more where the coordinator
finds each message of the inbox in a pass of its own."""
MAX_IDLE = 2.0


def operations_to_form(count: int) -> float:
    """Of each node, in a cycle that follows another: with its fault, and the assignment of ranks."""
    port = free_port()
    nodes = [simulated_nodes.OurNode(port, count, index) for index in range(count)]
    with ThreadPoolExecutor(count) as pool:
        for _ in range(2):
            simulated_nodes.operations.clear()
            assert sorted(pool.map(lambda one: one.form(), nodes)) == list(range(count))
        formed = sum(simulated_nodes.operations.values())
        list(pool.map(lambda one: one.leave(), nodes))
    return formed / count


def test_the_operations_of_a_node_do_not_grow_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    # No beat falls into a formation then, however long that takes on a busy machine.
    monkeypatch.setattr(simulated_nodes, "BEAT_S", 60.0)
    monkeypatch.setattr(simulated_nodes, "TIMEOUT_S", 600.0)
    few, many = operations_to_form(4), operations_to_form(16)
    assert many <= MAX_TO_FORM
    assert many <= 1.25 * few


@contextmanager
def job(backend: str, endpoint: str, count: int, **conf: Any) -> Iterator[list[NodeRendezvous]]:
    """So many nodes of a job in its first cycle, which ends in success."""
    parameters = RendezvousParameters(backend, endpoint, "load", count, count, **conf)
    settings = NodeSettings(Rules(Size(count, count)), judge, BEAT_S, 60.0)
    nodes = [
        NodeRendezvous(
            "ft-nodes",
            "load",
            lambda: open_job_store(backend, parameters),
            node(f"n{index}", 0),
            settings,
            PortHolder("127.0.0.1", None, None),
        )
        for index in range(count)
    ]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda one: one.next_rendezvous(), nodes))
        yield nodes
        for one in nodes:
            one.report_end(EndReason.SUCCEEDED, "")
        for one in nodes:
            while (end := one.pop_end()) is None:
                readable(one.descriptors(), 1.0)
            assert end.reason is EndReason.SUCCEEDED
        list(pool.map(lambda one: one.leave("done", 30.0), nodes))


def ask_each_other(nodes: list[NodeRendezvous]) -> None:
    """Every kind of store takes questions and answers."""
    asker, other, third = (one.questions for one in nodes[:3])
    assert asker and other and third
    place = nodes[1].place
    members = asker.members()
    assert place is not None and members is not None and len(members.active) == len(nodes)
    assert [asker.ask(Topic.RANKS), third.ask(Topic.RANKS)] == [1, 2]
    other.answer(Topic.RANKS, place.rank, "here")
    assert asker.answers(Topic.RANKS, range(len(nodes))) == {place.rank: b"here"}


def ask(etcd: EtcdServer, path: str, body: dict[str, Any] | None = None) -> str:
    """What etcd itself says."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    data = None if body is None else json.dumps(body).encode()
    with opener.open(urllib.request.Request(f"http://{etcd.endpoint}/{path}", data), timeout=20) as answer:
        return str(answer.read().decode())


def taken(etcd: EtcdServer) -> float:
    """The operations that etcd has taken, by its own count."""
    lines = ask(etcd, "metrics").splitlines()
    counts = (line.rpartition(" ")[2] for line in lines if line.startswith("grpc_server_started_total"))
    return sum(map(float, counts))


def left(etcd: EtcdServer) -> object:
    """What is kept in etcd, falsely if nothing."""
    return json.loads(ask(etcd, "v3/kv/range", {"key": "AA==", "range_end": "AA=="})).get("kvs")


@pytest.fixture
def beats_made(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Waits until the nodes of this process have made so many more beats, all together."""
    answered: list[float] = []
    renew = Lease.renew

    def counted(lease: Lease, sent_at: float) -> None:
        renew(lease, sent_at)
        answered.append(sent_at)

    def wait(count: int) -> None:
        wanted = len(answered) + count
        until(lambda: len(answered) >= wanted, f"{count} beats")

    monkeypatch.setattr(Lease, "renew", counted)
    return wait


@pytest.mark.parametrize("count", [6, pytest.param(24, marks=pytest.mark.slow)])
def test_an_idle_job_asks_little_of_etcd_and_leaves_nothing(count: int, beats_made: Callable[[int], None]) -> None:
    with running_etcd() as etcd:
        with job("etcd-v3", etcd.endpoint, count) as nodes:
            beats_made(2 * count)
            before, began = taken(etcd), time.monotonic()
            beats_made(BEATS * count)
            spent, beats = taken(etcd) - before, (time.monotonic() - began) / BEAT_S
            assert spent / count / beats <= MAX_IDLE
            ask_each_other(nodes)
            assert left(etcd)
        assert not left(etcd)


def test_a_store_in_files_does_not_grow_and_is_gone_after_the_job(
    tmp_path: Path, beats_made: Callable[[int], None]
) -> None:
    def files() -> dict[str, int]:
        return {file.name: file.stat().st_size // 16 for file in tmp_path.glob("store.d/=*")}

    with job("c10d", str(tmp_path / "store"), 3, store_type="file") as nodes:
        beats_made(4 * 3)
        before = files()
        beats_made(BEATS * 3)
        assert before and files() == before
        ask_each_other(nodes)
    assert list(tmp_path.iterdir()) == []
