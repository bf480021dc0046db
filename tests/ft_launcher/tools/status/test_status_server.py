"""The server by its sockets: who is answered, and what bad clients can do."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ft_launcher.tools.status import status_server
from ft_launcher.tools.status.status_server import Answer, StatusServer
from tests.patience import patient, until

LIMIT_S = patient(30)
TOKEN = "0123456789abcdef"


def answer(path: str, query: Mapping[str, str]) -> Answer:
    if path == "/fails":
        raise RuntimeError("no")
    if path == "/forever":
        return Answer(stream=iter(lambda: b"x" * 1000, b""))
    return Answer(f"{path} {dict(query)}".encode())


@contextlib.contextmanager
def serving(token: str | None = None) -> Iterator[StatusServer]:
    made = StatusServer(status_server.at_port("127.0.0.1", 0), answer, token, frozenset({"/open"}))
    try:
        yield made
    finally:
        made.close()


def get(port: int, path: str, **headers: str) -> tuple[int, str, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode(), response
    finally:
        connection.close()


def answering() -> int:
    """How many connections have a thread."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_answers() -> None:
    with serving() as one:
        assert get(one.port, "/a?x=1&y=2&x=3")[:2] == (200, "/a {'x': '3', 'y': '2'}")
        assert get(one.port, "/fails")[:2] == (500, "RuntimeError\n")
        code, _, response = get(one.port, "/")
        assert code == 200 and response.headers["Cache-Control"] == "no-store"
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert response.headers["Server"].strip() == "ft_launcher"


@pytest.mark.parametrize(
    ("path", "given", "code"),
    [
        ("/", {}, 401),
        ("/", {"Authorization": f"Bearer {TOKEN}"}, 200),
        ("/", {"authorization": f"Bearer {TOKEN}"}, 200),
        ("/", {"Authorization": f"Bearer {TOKEN}x"}, 401),
        ("/", {"Authorization": TOKEN}, 401),
        ("/", {"Authorization": "Bearer \xfc"}, 401),
        (f"/?token={TOKEN}", {}, 401),
        ("/open", {}, 200),
        ("/open/../", {}, 401),
    ],
)
def test_a_token(path: str, given: dict[str, str], code: int) -> None:
    with serving(TOKEN) as one:
        assert get(one.port, path, **given)[0] == code


@pytest.mark.parametrize(
    ("host", "code"),
    [("localhost:80", 200), ("127.0.0.1", 200), ("[::1]:9", 200), ("evil.example", 403), ("", 403), ("[", 500)],
)
def test_a_page_of_somebody_else_gets_nothing_from_this_host(host: str, code: int) -> None:
    with serving() as one:
        assert get(one.port, "/", Host=host)[0] == code


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", 400),
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n", 400),
        (b"GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n", 200),
    ],
)
def test_a_request_names_one_host(token: str | None, request_: bytes, code: int) -> None:
    with serving(token) as one, socket.create_connection(("127.0.0.1", one.port), LIMIT_S) as client:
        client.sendall(request_ + f"Authorization: Bearer {TOKEN}\r\n\r\n".encode())
        assert client.makefile("rb").readline().split()[1] == str(code).encode()


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"GET /?" + b"a=b&" * 100 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        random.Random(1).randbytes(5000) + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=lambda sent: repr(sent[:12]),
)
def test_bad_requests_harm_nobody(sent: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as one:
        with socket.create_connection(("127.0.0.1", one.port), LIMIT_S) as client, contextlib.suppress(OSError):
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536):
                pass
        assert get(one.port, "/")[0] == 200
    assert capsys.readouterr() == ("", "")


def test_clients_that_are_slow_on_purpose_keep_nobody_out() -> None:
    """Ten times as many as there is room for, each with half a request."""
    with serving() as one, contextlib.ExitStack() as held:
        for _ in range(10 * status_server.MAX_CONNECTIONS):
            client = held.enter_context(socket.create_connection(("127.0.0.1", one.port), LIMIT_S))
            with contextlib.suppress(OSError):
                client.sendall(b"GET / HTTP/1.1\r\nHost: local")
        assert get(one.port, "/")[0] == 200
        assert answering() <= 2 * status_server.MAX_CONNECTIONS


def test_no_more_threads_than_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that leave while their answers are made hold no connection, but a thread."""
    monkeypatch.setattr(status_server, "MAX_CONNECTIONS", 2)
    busy, may_end = threading.Semaphore(0), threading.Event()

    def slow(path: str, query: Mapping[str, str]) -> Answer:
        busy.release()
        may_end.wait(LIMIT_S)
        return Answer(b"ok")

    one = StatusServer(status_server.at_port("127.0.0.1", 0), slow)
    try:
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", one.port), LIMIT_S) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert busy.acquire(timeout=LIMIT_S)
        assert get(one.port, "/")[0] == 503
        assert not busy.acquire(blocking=False)
        may_end.set()
        assert get(one.port, "/")[0] == 200
    finally:
        may_end.set()
        one.close()


def test_one_that_waits_for_its_turn_does_not_hold_up_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(status_server, "_FREE_S", LIMIT_S)
    may_end = threading.Event()

    def slow(path: str, query: Mapping[str, str]) -> Answer:
        may_end.wait(LIMIT_S)
        return Answer(b"ok")

    one = StatusServer(status_server.at_port("127.0.0.1", 0), slow)
    clients = []
    try:
        for count in range(1, 5):
            clients.append(socket.create_connection(("127.0.0.1", one.port), LIMIT_S))
            clients[-1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until(lambda wanted=count: answering() >= wanted, "the third one holds up the fourth")
    finally:
        may_end.set()
        for client in clients:
            client.close()
        one.close()


def test_a_thousand_connections() -> None:
    with serving() as one, contextlib.ExitStack() as held:
        for _ in range(1000):
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_connection(("127.0.0.1", one.port), LIMIT_S))
        deadline = time.monotonic() + LIMIT_S
        code = 0
        while code != 200 and time.monotonic() < deadline:  # the queue of the kernel may be full
            with contextlib.suppress(OSError, http.client.HTTPException):
                code = get(one.port, "/")[0]
        assert code == 200


def test_it_closes_while_somebody_reads_without_end() -> None:
    with serving() as one:
        client = socket.create_connection(("127.0.0.1", one.port), LIMIT_S)
        client.sendall(b"GET /forever HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(100)
    with client, contextlib.suppress(ConnectionResetError):
        while client.recv(65536):
            pass


def test_a_socket_in_the_file_system_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "s"
    one = StatusServer(status_server.as_file(str(path)), answer)
    assert path.stat().st_mode & 0o777 == 0o600
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(path))
    client.sendall(b"GET /here HTTP/1.0\r\n\r\n")
    with client, client.makefile("rb") as answered:
        assert answered.read().endswith(b"/here {}")
    one.close()


def test_nobody_asks_and_nothing_is_imported() -> None:
    """A job that is never asked for its metrics does not import what makes them."""
    from tests.program import python

    code = """
import sys
from ft_launcher.tools.status import status_server
made = status_server.StatusServer(status_server.at_port("127.0.0.1", 0), None)
made.close()
assert "prometheus_client" not in sys.modules
"""
    python(code)
