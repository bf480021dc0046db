"""The backend `etcd-v3` and its store, against a real etcd."""

from __future__ import annotations

import itertools
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from ft_launcher.job.store.etcd import EtcdV3Backend, EtcdV3Store, create_backend
from tests.etcd_cluster import running_cluster
from tests.etcd_proxy import Proxy
from tests.etcd_server import EtcdServer, running_etcd
from tests.patience import patient, until
from tests.program import ROOT, ended, started

LIMIT_S = patient(60)
SOON = timedelta(milliseconds=200)
BYTES = bytes(range(256))


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with running_etcd() as server:
        yield server


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


def connect(endpoint: str, run_id: str, **settings: Any) -> tuple[EtcdV3Backend, EtcdV3Store]:
    return create_backend(RendezvousParameters("etcd-v3", endpoint, run_id, 1, 2, **{"read_timeout": 20, **settings}))


@pytest.fixture
def store(etcd: EtcdServer, run_id: str) -> EtcdV3Store:
    return connect(etcd.endpoint, run_id)[1]


def at_once(*actions: Callable[[], Any]) -> list[Any]:
    """The results of actions that begin together."""
    gate = threading.Barrier(len(actions))

    def begin(action: Callable[[], Any]) -> Any:
        gate.wait(LIMIT_S)
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(begin, actions, timeout=LIMIT_S))


# The state.


def test_the_state_is_written_by_whoever_holds_its_token(etcd: EtcdServer, run_id: str) -> None:
    (one, _), (other, _) = connect(etcd.endpoint, run_id), connect(etcd.endpoint, run_id)
    assert one.name == "etcd-v3"
    assert one.get_state() is None and one.set_state(b"early", 77) is None
    state, first, written = one.set_state(BYTES) or pytest.fail("nothing was written")
    assert (state, written) == (BYTES, True)
    assert other.get_state() == (BYTES, first)
    assert other.set_state(b"late") == (BYTES, first, False)
    _, second, written = other.set_state(b"", first) or pytest.fail("nothing was written")
    assert written
    for stale in (first, "text", b"bytes", -1):
        assert one.set_state(b"late", stale) == (b"", second, False)


def test_of_two_that_race_for_the_state_one_wins_each_round(etcd: EtcdServer, run_id: str) -> None:
    def raise_to(goal: int) -> int:
        backend, _ = connect(etcd.endpoint, run_id)
        won = 0
        while (now := backend.get_state() or (b"0", None)) and int(now[0]) < goal:
            won += (backend.set_state(b"%d" % (int(now[0]) + 1), now[1]) or (b"", 0, False))[2]
        return won

    assert sum(at_once(*[lambda: raise_to(60)] * 4)) == 60


# The store.


def test_it_does_what_tcpstore_does(store: EtcdV3Store) -> None:
    """Under a PrefixStore, as the ranks and the agents use it."""
    theirs = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def story(root: Store) -> list[Any]:
        one = PrefixStore("one", root)
        one.set("text", "v")
        one.set("bytes", BYTES)
        one.set("empty", "")
        one.multi_set(["x/y", "ü"], ["1", "2"])
        return [
            [one.get(key) for key in ("text", "bytes", "empty", "x/y", "ü")],
            one.multi_get(["bytes", "text"]),
            [one.add("count", number) for number in (1, 5, -2, 0)],
            one.get("count"),
            [one.check(keys) for keys in (["text"], ["text", "count"], ["text", "none"])],
            one.wait(["text", "ü"]),
            one.wait(["text"], timedelta(seconds=1)),
            [one.delete_key("text"), one.delete_key("text"), one.check(["text"])],
            [one.compare_set("new", *pair) for pair in (("a", "b"), ("", "c"), ("", "d"), ("c", "e"), ("c", "f"))],
            one.get("new"),
            PrefixStore("other", root).check(["bytes"]),
        ]

    assert story(store) == story(theirs)
    assert store.get("one/bytes") == BYTES


def test_everybody_who_adds_gets_a_number_of_their_own(etcd: EtcdServer, run_id: str) -> None:
    def add() -> list[int]:
        _, store = connect(etcd.endpoint, run_id)
        return [store.add("count", 1) for _ in range(25)]

    assert sorted(itertools.chain(*at_once(*[add] * 4))) == list(range(1, 101))


def test_more_keys_than_fit_in_a_transaction(store: EtcdV3Store) -> None:
    keys = [f"key{number}" for number in range(300)]
    store.multi_set(keys, keys)
    store.wait(keys)
    assert store.check(keys) and not store.check([*keys, "none"])
    assert store.multi_get(keys) == [key.encode() for key in keys]


def test_jobs_do_not_meet(etcd: EtcdServer, run_id: str) -> None:
    names = [run_id, f"{run_id}/store", f"{run_id}/store/a"]
    stores = [connect(etcd.endpoint, name)[1] for name in names]
    other = connect(etcd.endpoint, run_id, key_prefix="/other")[1]
    stores[0].set("a/b", "0")
    assert not any(one.check([key]) for one in (*stores[1:], other) for key in ("b", "a/b"))
    assert connect(etcd.endpoint, run_id, etcd_prefix="/ft_launcher/")[1].get("a/b") == b"0"


def test_time_runs_out(store: EtcdV3Store) -> None:
    with pytest.raises(DistStoreError, match=r"wait timeout after 0:00:00.2\d*, not set \(1 of 1\): none"):
        store.wait(["none"], SOON)
    store.set_timeout(SOON)
    assert store.timeout == SOON
    store.set("there", "1")
    for read in (lambda: store.get("none"), lambda: PrefixStore("p", store).get("none")):
        with pytest.raises(DistStoreError):
            read()
    with pytest.raises(DistStoreError, match=r"not set \(1 of 2\): none"):
        store.multi_get(["there", "none"])


PING = """
import sys
from tests.ft_launcher.job.store.test_etcd import connect
_, store = connect(*sys.argv[1:])
store.set("here", "1")
for number in range(20):
    store.wait([f"ping{number}"])
    store.set(f"pong{number}", f"answer {number}")
"""


def test_a_wait_ends_when_another_process_writes(etcd: EtcdServer, store: EtcdV3Store, run_id: str) -> None:
    with started([sys.executable, "-c", PING, etcd.endpoint, run_id], cwd=ROOT) as other:
        store.set_timeout(timedelta(seconds=LIMIT_S))
        store.wait(["here"])
        for number in range(20):
            store.set(f"ping{number}", "")
            assert store.get(f"pong{number}") == b"answer %d" % number
        code, _, err = ended(other)
        assert code == 0, err


# The lease.


def test_records_go_when_the_job_is_dead_and_only_then(etcd: EtcdServer, run_id: str) -> None:
    """etcd's clock is the measure: one job's records are there when those of a job that ended later are gone."""
    living, dead = (connect(etcd.endpoint, f"{run_id}-{name}", ttl=1) for name in ("living", "dead"))
    living[1].set("key", "1")
    dead[1].set("key", "1")
    gateway, key = dead[1].records.gateway, dead[1].records.key_of("store/key")
    del dead
    until(lambda: not gateway.call("kv/range", {"key": key}).get("count"), "the records of a dead job are gone", 60)
    assert living[1].get("key") == b"1"


def test_two_nodes_share_one_lease_for_all_records(etcd: EtcdServer, run_id: str) -> None:
    nodes = at_once(*[lambda: connect(etcd.endpoint, run_id, ttl=500)] * 4)
    for number, (backend, store) in enumerate(nodes):
        store.add("count", 1)
        store.set(f"key{number}", "")
        backend.set_state(b"", None)
        store.add(f"beat/{number}", 1)
    records = nodes[0][1].records
    span = {"key": records.key_of(""), "range_end": records.key_of("~")}
    leases = {record["lease"] for record in records.gateway.call("kv/range", span)["kvs"]}
    assert leases == {records.lease}
    lease = records.gateway.call("kv/lease/timetolive", {"ID": records.lease})
    assert lease["grantedTTL"] == "500"


# Faults.


@pytest.fixture
def own_etcd() -> Iterator[EtcdServer]:
    """A server that a test may stop."""
    with running_etcd() as server:
        yield server


def test_a_restart_of_etcd_is_lived_through(own_etcd: EtcdServer, run_id: str) -> None:
    backend, store = connect(own_etcd.endpoint, run_id)
    _, token, _ = backend.set_state(b"state") or pytest.fail("nothing was written")
    store.set_timeout(timedelta(seconds=LIMIT_S))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "late")
        for number in range(3):
            assert store.add("count", 1) == number + 1
            own_etcd.restart()
        assert backend.get_state() == (b"state", token)
        assert not waiting.done()
        store.set("late", "1")
        assert waiting.result(LIMIT_S) == b"1"


def test_an_etcd_that_lost_its_records_is_filled_anew(own_etcd: EtcdServer, run_id: str) -> None:
    backend, store = connect(own_etcd.endpoint, run_id)
    backend.set_state(b"old")
    own_etcd.forget()
    assert backend.get_state() is None
    assert store.add("count", 1) == 1
    assert (backend.set_state(b"new") or ())[2:] == (True,)


def test_a_write_whose_answer_is_lost_counts_once(etcd: EtcdServer, run_id: str) -> None:
    with Proxy(etcd.port) as proxy:
        backend, store = connect(proxy.endpoint, run_id)
        for number in range(1, 6):
            proxy.lose_next.set()
            assert store.add("count", 1) == number
            assert not proxy.lose_next.is_set()
        records = store.records
        (count,), _ = records.read(["store/count"])
        proxy.lose_next.set()
        written, now = records.swap("store/count", count.revision, b"6")
        assert written and now == records.read(["store/count"])[0][0]
        proxy.lose_next.set()
        assert (backend.set_state(b"state") or ())[2:] == (True,)
        proxy.lose_next.set()
        assert backend.set_state(b"late", 1) == (*(backend.get_state() or ()), False)


def test_an_etcd_that_stands_still(own_etcd: EtcdServer, run_id: str) -> None:
    backend, store = connect(own_etcd.endpoint, run_id, read_timeout=4)
    own_etcd.pause()
    with pytest.raises(RendezvousConnectionError, match=f"{own_etcd.endpoint}: no answer in time"):
        backend.set_state(b"state")
    with pytest.raises(RendezvousConnectionError, match="no answer in time"):
        store.get("key")
    own_etcd.resume()
    store.set("key", "1")
    assert store.get("key") == b"1"


def test_the_leader_of_a_cluster_stands_still(run_id: str) -> None:
    """The others choose another; what was written stays, and is there when the paused one is back."""
    with running_cluster() as cluster:
        backend, store = connect(cluster.endpoints, run_id, read_timeout=30)
        _, token, _ = backend.set_state(b"before") or pytest.fail("nothing was written")
        store.set("key", "1")
        assert store.add("count", 1) == 1
        leader = cluster.leader()
        leader.pause()
        assert store.get("key") == b"1"
        assert store.add("count", 1) == 2
        written = backend.set_state(b"meanwhile", token)
        assert written is not None and written[2]
        other = cluster.leader()
        assert other is not leader
        leader.resume()
        alone = connect(f"127.0.0.1:{leader.port}", run_id, read_timeout=30)
        assert alone[1].add("count", 1) == 3
        assert alone[0].get_state() == (b"meanwhile", written[1])
