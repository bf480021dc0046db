"""Cutting connections: those that are meant, and no others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ft_client.inprocess import connections

DEADLINE_S = 20.0


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
    assert connections.cut_store(meant.port) == 1
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
    connections.cut_store(pair.port)
    waiting.join(DEADLINE_S)
    assert received == [b""]


def test_nothing_to_cut() -> None:
    with socket.create_server(("", 0)) as server:
        assert connections.cut_store(server.getsockname()[1]) == 0
    assert connections.cut_gloo() == []


def test_a_loop_whose_sockets_cannot_be_found_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is called as gloo's is and waits for something else."""
    monkeypatch.setattr(connections, "_LOOP_SEEN_S", 0.02)
    named, over = threading.Event(), threading.Event()

    def wait() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("gloo_tcp_loop")
        named.set()
        over.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        assert named.wait(DEADLINE_S)
        assert connections.cut_gloo() == [f"gloo's thread {thread.native_id} shows no sockets in /proc"]
    finally:
        over.set()
        thread.join()
