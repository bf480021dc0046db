"""The slow line: everything arrives, in order and later; it can be stalled, and connections can be broken."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from tests.nodes.slow_proxy import Line, SlowProxy
from tests.patience import patient
from tests.ports import free_port

DELAY_S = 0.05
LIMIT_S = patient(20.0)


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends everything back."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=send_back, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def send_back(connection: socket.socket) -> None:
    with connection:
        while piece := connection.recv(65536):
            connection.sendall(piece)


def send_all(line: socket.socket, data: bytes) -> None:
    line.sendall(data)
    line.shutdown(socket.SHUT_WR)


def call(proxy: SlowProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), LIMIT_S)


def test_all_arrives_later_and_in_order(echo: int) -> None:
    sent = bytes(range(256)) * 4000
    with SlowProxy(subprocess.Popen, "127.0.0.1", echo, Line(DELAY_S, loss=0.05, stall_s=0.05)) as proxy:
        with call(proxy) as line:
            began = time.monotonic()
            threading.Thread(target=send_all, args=(line, sent)).start()
            found = b"".join(iter(lambda: line.recv(65536), b""))
        assert found == sent
        assert time.monotonic() - began >= 2 * DELAY_S  # less would be no delay; there is no upper limit here


def test_a_stalled_line_takes_and_keeps_what_is_sent(echo: int) -> None:
    with SlowProxy(subprocess.Popen, "127.0.0.1", echo, Line()) as proxy, call(proxy) as line:
        proxy.stall()
        line.sendall(b"late")
        line.settimeout(0.3)
        with pytest.raises(TimeoutError):
            line.recv(4)
        line.settimeout(LIMIT_S)
        proxy.go()
        assert line.recv(4) == b"late"


def test_a_broken_line_can_be_called_again(echo: int) -> None:
    with SlowProxy(subprocess.Popen, "127.0.0.1", echo, Line()) as proxy:
        with call(proxy) as line:
            line.sendall(b"once")
            assert line.recv(4) == b"once"
            proxy.drop()
            with pytest.raises(ConnectionError):
                assert not line.recv(4)
                raise ConnectionError
        with call(proxy) as again:
            again.sendall(b"again")
            assert again.recv(5) == b"again"


def test_a_target_that_refuses_ends_the_connection() -> None:
    with SlowProxy(subprocess.Popen, "127.0.0.1", free_port(), Line()) as proxy, call(proxy) as line:
        try:
            assert line.recv(1) == b""
        except ConnectionError:
            pass
