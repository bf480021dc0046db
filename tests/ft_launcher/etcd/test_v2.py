"""The store over etcd's v2 API, against a real etcd: it does what TCPStore does, and wakes nobody for nothing."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousParameters

from ft_launcher.etcd.v2 import EtcdV2Store
from ft_launcher.nodes.job_store import JobStore
from ft_launcher.nodes.store_connection import open_job_store
from tests.etcd_server import EtcdServer, running_etcd
from tests.patience import patient

PATIENT_S = patient(60.0)


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """One server for all tests."""
    with running_etcd() as server:
        yield server


@pytest.fixture
def store(etcd: EtcdServer) -> Iterator[EtcdV2Store]:
    """A store of its own for each test; nothing of it stays."""
    opened = job_store(etcd)
    opened.enter("attempt")
    opened.hold()
    yield opened.raw
    head = opened.set_head("over", None)
    assert head is not None
    opened.remove(head)
    assert keys_in(etcd) == []


def job_store(etcd: EtcdServer) -> JobStore:
    """A node's connection."""
    return open_job_store("etcd-v2", RendezvousParameters("etcd-v2", etcd.endpoint, "a job/_1", 1, 2))


def ask(etcd: EtcdServer, path: str) -> str:
    """What etcd itself says."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{etcd.endpoint}/{path}", timeout=20) as answer:
        return str(answer.read().decode())


def keys_in(etcd: EtcdServer) -> list[str]:
    """All keys and folders."""
    found, nodes = [], [json.loads(ask(etcd, "v2/keys/?recursive=true"))["node"]]
    while nodes:
        node: dict[str, Any] = nodes.pop()
        nodes += node.get("nodes", [])
        found += [node["key"]] if "key" in node else []
    return found


def requests(etcd: EtcdServer) -> float:
    """How many etcd has taken by the v2 API."""
    lines = (line.split() for line in ask(etcd, "metrics").splitlines() if line.startswith("etcd_http_received_total"))
    return sum(float(number) for _, number in lines)


FOLDER = "ft_launcher/a job/_1/attempt"


def test_it_does_what_tcpstore_does(store: EtcdV2Store) -> None:
    store.set(f"{FOLDER}/text", "ä")
    store.set(f"{FOLDER}/text/below", b"\xff\0")
    assert store.get(f"{FOLDER}/text") == "ä".encode()
    assert store.multi_get([f"{FOLDER}/text/below", f"{FOLDER}/text"]) == [b"\xff\0", "ä".encode()]
    assert [store.add(f"{FOLDER}/count", number) for number in (0, 2, 0, 3)] == [0, 2, 2, 5]
    assert store.get(f"{FOLDER}/count") == b"5"
    assert store.compare_set(f"{FOLDER}/once", "", "first") == b"first"
    assert store.compare_set(f"{FOLDER}/once", "", "second") == b"first"
    assert store.compare_set(f"{FOLDER}/once", "first", "third") == b"third"
    assert store.compare_set(f"{FOLDER}/none", "some", "other") == b"some"
    assert store.check([f"{FOLDER}/once", f"{FOLDER}/text/below"])
    assert not store.check([f"{FOLDER}/once", f"{FOLDER}/none"])
    assert store.delete_key(f"{FOLDER}/once") and not store.delete_key(f"{FOLDER}/once")
    with pytest.raises(DistStoreError):
        store.wait([f"{FOLDER}/none"], timedelta(seconds=0.2))


def test_everybody_who_adds_gets_a_number_of_their_own(etcd: EtcdServer, store: EtcdV2Store) -> None:
    stores = [store, *(job_store(etcd).raw for _ in range(3))]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: [one.add(f"{FOLDER}/count", 1) for _ in range(10)], stores))
    assert sorted(number for part in found for number in part) == list(range(1, 41))


def test_a_beat_is_one_request_and_wakes_nobody_who_waits_for_another_key(etcd: EtcdServer, store: EtcdV2Store) -> None:
    waiting, found = job_store(etcd), list[bytes | None]()
    waiting.enter("attempt")
    thread = threading.Thread(target=lambda: found.append(waiting.receive("end/0", PATIENT_S)))
    thread.start()
    store.add(f"{FOLDER}/beat/a", 1)
    before = requests(etcd)
    for _ in range(20):
        store.add(f"{FOLDER}/beat/a", 1)
    assert requests(etcd) - before <= 20 + 2, "the wait may have begun meanwhile"
    store.set(f"{FOLDER}/end/0", "now")
    thread.join(PATIENT_S)
    assert found == [b"now"]


def test_a_held_folder_has_a_lease(etcd: EtcdServer, store: EtcdV2Store) -> None:
    store.hold("ft_launcher/brief", 1)
    store.set("ft_launcher/brief/key", "value")
    store.hold(FOLDER, 100)
    done = threading.Event()
    while store.check(["ft_launcher/brief/key"]):
        assert not done.wait(0.1)
    assert store.folders("ft_launcher/a job/_1") == ["attempt"]
