"""The job's store over torch's own: TCPStore and FileStore."""

from __future__ import annotations

import contextlib
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from ft_launcher.job.store.job_store import JobStore
from ft_launcher.job.store.store_connection import open_job_store
from rank_monitor.contract.errors import StoreLost
from tests.patience import patient
from tests.ports import free_port
from tests.program import output_of

PATIENT_S = patient(60.0)


@pytest.fixture
def server() -> TCPStore:
    """A store apart from the nodes."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


@pytest.fixture(params=["tcp", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path, server: TCPStore) -> Iterator[JobStore]:
    """A connection of a node that does not host the store."""
    if request.param == "tcp":
        yield JobStore(*opened(f"127.0.0.1:{server.port}"))
    else:
        endpoint = str(tmp_path / "store")
        yield open_job_store("c10d", RendezvousParameters("c10d", endpoint, "job", 1, 2, store_type="file"))


def opened(endpoint: str) -> tuple[Any, ...]:
    """As another process sees it: here the server is in this one."""
    of_host = open_job_store("c10d", RendezvousParameters("c10d", endpoint, "job", 1, 2, is_host="0"))
    return of_host.backend, of_host.raw, of_host.connect, of_host.run_id, False


def keys_of(store: JobStore) -> PrefixStore:
    """The keys of the attempt that a connection belongs to, as another program can write them."""
    return PrefixStore(f"ft_launcher/{store.run_id}/{store.attempt}", store.raw)


def test_messages_are_read_in_the_order_of_their_numbers(store: JobStore) -> None:
    for text in ("one", "two", "three"):
        store.post(text)
    store.publish({"term": "7"})
    assert store.read_inbox(0, PATIENT_S) == ([b"one", b"two", b"three"], [])
    assert store.read_inbox(1, PATIENT_S, ("term",)) == ([b"two", b"three"], [b"7"])
    assert store.read_inbox(3, 0.0) == ([], [])


def test_a_reader_is_woken_by_a_message(store: JobStore) -> None:
    reader, found = store.another(), []
    thread = threading.Thread(target=lambda: found.append(reader.read_inbox(0, PATIENT_S)))
    thread.start()
    store.post("one")
    thread.join(PATIENT_S)
    assert found == [([b"one"], [])]


@pytest.mark.parametrize("holes", [{2}, {2, 3}, {4}, {2, 5, 6}, {6}])
def test_what_is_written_before_a_hole_is_read(store: JobStore, holes: set[int]) -> None:
    for number in range(1, 7):
        assert keys_of(store).add("inbox", 1) == number
        if number not in holes:
            keys_of(store).set(f"inbox/{number}", str(number))
    texts, _ = store.read_inbox(0, PATIENT_S)
    assert texts == [str(number).encode() for number in range(1, min(holes))]


def test_a_hole_is_given_up_and_its_late_writer_takes_another_place(store: JobStore) -> None:
    assert keys_of(store).add("inbox", 1) == 1  # a writer between its two steps
    store.post("two")
    assert store.read_inbox(0, 0.0) == ([], [])
    store.give_up_missing(0, 1)
    store.give_up_missing(0, 2)
    assert store.read_inbox(0, 0.0) == ([b"", b"two"], [])
    store.give_up_missing(2, 2)
    assert store.read_inbox(2, 0.0) == ([], []), "nobody has taken the third place yet"
    assert keys_of(store).compare_set("inbox/1", "", "one") != b"one"


def test_many_writers_lose_nothing(store: JobStore) -> None:
    connections = [store.another() for _ in range(8)]
    threads = [
        threading.Thread(target=lambda writer=writer, at=at: [writer.post(f"{at}.{n}") for n in range(20)])
        for at, writer in enumerate(connections)
    ]
    for thread in threads:
        thread.start()
    read: list[bytes] = []
    while len(read) < 160:
        texts, _ = store.read_inbox(len(read), PATIENT_S)
        assert texts, "a message is missing"
        read += texts
    for at in range(8):
        own = [text.decode() for text in read if text.startswith(f"{at}.".encode())]
        assert own == [f"{at}.{n}" for n in range(20)]
    store.remove_messages(range(1, 161))
    assert store.read_inbox(0, 0.0) == ([], [])


def test_answers(store: JobStore) -> None:
    assert store.receive("reply/a/1", 0.0) is None
    store.publish({"reply/a/1": "x", "reply/b/1": "y"})
    assert store.receive("reply/b/1", PATIENT_S) == b"y"
    store.drop("reply/b/1")
    assert store.receive("reply/b/1", 0.0) is None
    assert store.receive("reply/a/1", 0.0) == b"x"


def test_beats(store: JobStore) -> None:
    assert store.counters([]) == ({}, [])
    assert store.counters(["a"], ("term",)) == ({"a": None}, [b""])
    assert [store.beat("a"), store.beat("a")] == [1, 2]
    store.publish({"term": "1"})
    assert store.counters(["a", "b"], ("term",)) == ({"a": 2, "b": None}, [b"1"])
    store.beat("b")
    assert store.counters(["a", "b"]) == ({"a": 2, "b": 1}, [])


def test_a_counter_that_is_no_number_begins_anew(store: JobStore) -> None:
    keys_of(store).set("beat/a", "x")
    assert store.counters(["a"]) == ({"a": 0}, [])
    assert store.beat("a") == 1
    assert store.counters(["a"]) == ({"a": 1}, [])


def test_one_of_many_writes_the_first_record(store: JobStore) -> None:
    connections = [store.another() for _ in range(6)]
    begin, won = threading.Barrier(6), []

    def race(at: int) -> None:
        begin.wait(PATIENT_S)
        won.append((at, connections[at].set_head(f"node {at}", None)))

    threads = [threading.Thread(target=race, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENT_S)
    winners = [at for at, head in won if head is not None]
    head = store.head()
    assert len(winners) == 1 and head is not None
    assert head.value == f"node {winners[0]}".encode()


def test_a_record_is_written_only_over_the_one_that_was_read(store: JobStore) -> None:
    assert store.head() is None
    first = store.set_head("first", None)
    assert first is not None and store.set_head("other", None) is None
    second = store.set_head("second", first)
    assert second is not None
    assert store.set_head("late", first) is None, "a superseded writer"
    assert store.set_head("second", first) is not None, "the same writer, whose answer was lost"
    found = store.head()
    assert found is not None and found.value == b"second"


def test_the_server_of_the_store_knows_that_it_is(server: TCPStore) -> None:
    endpoint = f"127.0.0.1:{server.port}"
    store = JobStore(*opened(endpoint))
    assert not store.has_host()
    assert open_job_store("c10d", RendezvousParameters("c10d", endpoint, "job", 1, 2)).hosted_here
    assert store.may_have_host and store.has_host() and not store.another().hosted_here


def test_two_jobs_share_a_store_and_see_nothing_of_each_other(server: TCPStore) -> None:
    endpoint = f"127.0.0.1:{server.port}"
    one, other = (
        open_job_store("c10d", RendezvousParameters("c10d", endpoint, job, 1, 2, is_host="0"))
        for job in ("one", "other")
    )
    one.post("text")
    one.beat("a")
    one.set_head("head", None)
    assert other.read_inbox(0, 0.0) == ([], [])
    assert other.counters(["a"]) == ({"a": None}, [])
    assert other.head() is None


def test_what_the_store_has_lost_is_missing_and_holds_up_nobody(tmp_path: Path) -> None:
    endpoint = str(tmp_path / "store")
    store = open_job_store("c10d", RendezvousParameters("c10d", endpoint, "job", 1, 2, store_type="file"))
    store.beat("a")
    store.publish({"term": "7"})
    assert store.counters(["a"], ["term"]) == ({"a": 1}, [b"7"])
    assert store.set_head("record", None) is not None
    shutil.rmtree(f"{endpoint}.d")
    assert store.counters(["a"], ["term"]) == ({"a": None}, [b""])
    assert store.head() is None


def test_the_second_job_of_a_store_hears_of_the_first(store: JobStore) -> None:
    heard = []
    for job in ("one", "one", "other"):
        store.run_id = job
        heard.append(store.other_job())
    assert heard == ["", "", "one"]


def test_a_store_that_is_gone_is_lost_in_every_operation() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    store = JobStore(*opened(f"127.0.0.1:{port}"))
    del server
    # A free port could be given to the store of another test, or to our own end of a connection to it.
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    for operation in (
        lambda: store.post("x"),
        lambda: store.read_inbox(0, 1.0),
        lambda: store.receive("x", 1.0),
        lambda: store.beat("a"),
        lambda: store.counters(["a"]),
        store.head,
        store.another,
    ):
        with pytest.raises(StoreLost):
            operation()
    held.close()


def test_a_lost_connection_that_is_told_late_is_no_silence(server: TCPStore) -> None:
    class Lost(Store):  # type: ignore[misc]
        def wait(self, keys: list[str], limit: timedelta) -> None:
            time.sleep(limit.total_seconds())
            raise DistNetworkError("Broken pipe")

    backend, _, *rest = opened(f"127.0.0.1:{server.port}")
    store = JobStore(backend, Lost(), *rest)
    with pytest.raises(StoreLost):
        store.receive("x", 0.001)


class Removing:
    """A store of which another process removes each key once it was seen."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        def called(keys: Any, *more: Any) -> Any:
            found = getattr(self._store, name)(keys, *more)
            if name in ("check", "wait"):
                for key in keys:
                    self._store.delete_key(key)
            return found

        return called


@pytest.mark.parametrize("limit_s", [0.0, PATIENT_S], ids=["look", "wait"])
def test_no_read_waits_for_a_value_that_was_removed(store: JobStore, limit_s: float) -> None:
    store.publish({"reply/a/1": "x"})
    store.post("one")
    store._store = Removing(store._store)
    ended: list[object] = []

    def read() -> None:
        ended.append(store.receive("reply/a/1", limit_s))
        ended.append(store.rescue(0, 1 << 20))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(PATIENT_S / 4)
    assert ended == [None, []]


CONNECT_S = str(round(patient(2)))
"""Seconds. More than the look-up of a host's name takes that nobody answers: 1 s with the settings of CI."""
NO_HOST: dict[str, dict[str, Any]] = {
    "c10d": {"read_timeout": CONNECT_S, "is_host": "0"},
    "static": {"timeout": CONNECT_S, "rank": 1},
}


HTTP = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("backend", "words"), [("c10d", HTTP), ("static", HTTP), ("static", b"")], ids=["c10d", "static", "silent"]
)
def test_a_server_of_another_kind_is_no_store(backend: str, words: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        calls: list[socket.socket] = []

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    calls.append(server.accept()[0])
                    calls[-1].sendall(words)

        threading.Thread(target=answer, daemon=True).start()
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        parameters = RendezvousParameters(backend, endpoint, "job", 2, 2, **NO_HOST[backend])
        with pytest.raises(RendezvousConnectionError) as told:
            open_job_store(backend, parameters)
        server.shutdown(socket.SHUT_RDWR)
    for call in calls:
        call.close()
    problem = "what answers at {} is not a store of torch's: another program has that port"
    assert (problem if words else "{} accepts connections and says nothing").format(endpoint) in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("backend", NO_HOST)
def test_an_endpoint_that_refuses_is_named(backend: str) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    parameters = RendezvousParameters(backend, endpoint, "job", 2, 2, **NO_HOST[backend])
    with pytest.raises(RendezvousConnectionError, match=rf"nobody answers at {endpoint} \(Connection refused\)"):
        open_job_store(backend, parameters)


MANY_CONNECTIONS = """
import threading
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from ft_launcher.job.store.store_connection import open_job_store

server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
endpoint = f"127.0.0.1:{server.port}"
store = open_job_store("c10d", RendezvousParameters("c10d", endpoint, "job", 1, 2, is_host="0"))
done = []

def connect():
    for _ in range(25):
        store.another()
    done.append(True)

threads = [threading.Thread(target=connect) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(done))
"""


def test_threads_that_connect_at_once(tmp_path: Path) -> None:
    """torch 2.6 ended the process, "Tried to deallocate unregistered instance!".

    No resolver is asked for the names of the 100 clients, which client and server look up: this machine's may be slow.
    """
    program = tmp_path / "program.py"
    program.write_text(MANY_CONNECTIONS)
    assert output_of([sys.executable, str(program)], tmp_path, RES_OPTIONS="attempts:0").split() == ["4"]


@pytest.mark.parametrize("other", ["x/y", "x/y/z", "x%2Fy"])
def test_another_job_keeps_its_keys_when_old_attempts_are_removed(other: str, tmp_path: Path, server: TCPStore) -> None:
    """Also a job whose run id begins with that of this job and a slash."""
    stores = [open_job_store("c10d", RendezvousParameters("c10d", str(tmp_path / "s"), "x", 1, 2, store_type="file"))]
    if hasattr(server, "list_keys"):
        stores.append(JobStore(*opened(f"127.0.0.1:{server.port}")))
    for store in stores:
        own, old, others = (
            JobStore(store.backend, store.raw, store.connect, run_id, False) for run_id in ("x", "x", other)
        )
        for connection, attempt in ((own, "now"), (old, "before"), (others, "theirs")):
            connection.enter(attempt)
            connection.publish({"key": attempt})
        own.remove_other_attempts()
        found = [connection.receive("key", limit_s=0) for connection in (own, old, others)]
        assert found == [b"now", None, b"theirs"]
