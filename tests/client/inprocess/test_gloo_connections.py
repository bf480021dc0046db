"""Cutting connections: those that are meant, and no others."""

from __future__ import annotations

import os
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from ft_client.inprocess import gloo_connections
from rank_monitor.contract.processes import proc
from tests.patience import patient

DEADLINE_S = patient(20.0)


class Pair:
    """A server with one client, both in this process."""

    def __init__(self, until: ExitStack, family: socket.AddressFamily = socket.AF_INET) -> None:
        self.server = until.enter_context(socket.create_server(("", 0), family=family))
        self.port = int(self.server.getsockname()[1])
        self.client = self.connect(until)
        self.accepted = until.enter_context(self.server.accept()[0])
        self.accepted.settimeout(DEADLINE_S)

    def connect(self, until: ExitStack) -> socket.socket:
        """Another client."""
        host = "127.0.0.1" if self.server.family == socket.AF_INET else "::1"
        return until.enter_context(socket.create_connection((host, self.port), DEADLINE_S))

    def is_open(self) -> bool:
        try:
            self.client.send(b"x")
            return self.accepted.recv(1) == b"x"
        except OSError:
            return False


@pytest.fixture
def until() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_only_connections_to_the_port_are_cut(until: ExitStack, family: socket.AddressFamily) -> None:
    meant, other = Pair(until, family), Pair(until)
    ends = socket.socketpair()
    assert gloo_connections.cut_store(meant.port) == 1
    assert not meant.is_open() and other.is_open()
    assert ends[0].send(b"x") == 1
    for end in ends:
        end.close()
    meant.connect(until)  # the server goes on


def test_who_waits_is_freed(until: ExitStack) -> None:
    pair = Pair(until)
    received: list[bytes] = []
    waiting = threading.Thread(target=lambda: received.append(pair.client.recv(1)))
    waiting.start()
    gloo_connections.cut_store(pair.port)
    waiting.join(DEADLINE_S)
    assert received == [b""]


def test_nothing_to_cut() -> None:
    with socket.create_server(("", 0)) as server:
        assert gloo_connections.cut_store(server.getsockname()[1]) == 0
    assert gloo_connections.cut_gloo() == []


def test_a_loop_whose_sockets_cannot_be_found_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is called as gloo's is and waits for something else."""
    monkeypatch.setattr(gloo_connections, "_LOOP_SEEN_S", 0.02)
    named, over = threading.Event(), threading.Event()

    def wait() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("gloo_tcp_loop")
        named.set()
        over.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        assert named.wait(DEADLINE_S)
        assert gloo_connections.cut_gloo() == [f"gloo's thread {thread.native_id} shows no sockets in /proc"]
    finally:
        over.set()
        thread.join()


@contextmanager
def loop_of(*files: socket.socket | int) -> Iterator[None]:
    """A thread that is called as gloo's is and waits for these as that does, until one is readable or the test ends."""
    end, ended = os.pipe()
    named = threading.Event()

    def wait() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("gloo_tcp_loop")
        named.set()
        poll.poll()

    with select.epoll() as poll:
        for one in (end, *files):
            poll.register(one, select.EPOLLIN)
        thread = threading.Thread(target=wait)
        thread.start()
        try:
            assert named.wait(DEADLINE_S)
            yield
        finally:
            os.write(ended, b"x")
            thread.join()
            os.close(end)
            os.close(ended)


class PeerThatNeverComes(dist.Store):
    """What two ranks of gloo tell each other; the other's address is such that this rank waits for its connection."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, bytes] = {}
        self.is_read = threading.Event()

    def set(self, key: str, value: bytes) -> None:
        self.kept[key] = bytes(value)

    def wait(self, keys: list[str], timeout: object = None) -> None:
        pass

    def get(self, key: str) -> bytes:
        if key not in self.kept:  # the other's, by the form of this rank's own: the highest port of all
            (own,) = self.kept.values()
            port = own[own.index(LOOPBACK) - 2 :][:2]
            self.is_read.set()
            return own.replace(port + LOOPBACK, b"\xff\xff" + LOOPBACK)
        return self.kept[key]


LOOPBACK = socket.inet_aton("127.0.0.1")


def test_a_group_that_waits_for_a_peer_gets_another_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, ended = PeerThatNeverComes(), threading.Event()

    def make() -> None:
        with suppress(RuntimeError):
            dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=DEADLINE_S * 10))
        ended.set()

    threading.Thread(target=make, daemon=True).start()
    assert store.is_read.wait(DEADLINE_S)
    gloo_connections.cut_gloo()
    assert not ended.wait(0.1)
    deadline = time.monotonic() + DEADLINE_S
    while not ended.wait(0.05):
        assert time.monotonic() < deadline, "it waits for ever"
        gloo_connections.stand_in_for_peers(2)
    gloo_connections.close_cut()


def test_nobody_stands_in_where_few_more_files_may_be_opened() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0)) as server, loop_of(server):
        server.setblocking(False)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(proc.own_descriptors()) + 20, limits[1]))
        try:
            gloo_connections.stand_in_for_peers(3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        with pytest.raises(BlockingIOError):
            server.accept()
        gloo_connections.stand_in_for_peers(3)
        for _ in range(3):
            server.accept()[0].close()


def test_what_is_no_listening_socket_leaves_no_descriptor_open() -> None:
    ends = socket.socketpair()
    with loop_of(ends[0]):
        before = proc.own_descriptors()
        gloo_connections.stand_in_for_peers(1)
        assert proc.own_descriptors() == before
    for end in ends:
        end.close()


def test_a_peer_may_send_to_what_was_cut_of_gloo_until_it_is_let_go(until: ExitStack) -> None:
    """A send that fails before the end is read is one that gloo never ends."""
    pair = Pair(until)
    with loop_of(pair.client):
        assert gloo_connections.cut_gloo() == []
    assert pair.client.recv(1) == b"", "its end is read"
    pair.client.close()
    for _ in range(3):
        assert pair.accepted.send(b"x") == 1
    gloo_connections.close_cut()
    with pytest.raises(OSError):
        for _ in range(3):
            pair.accepted.send(b"x")
            assert select.select([pair.accepted], [], [], DEADLINE_S)[0]
