"""Asking NCCL's RAS, of servers over TCP that speak its protocol or do not. The real one needs a GPU: tests/gpu/."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ft_launcher.agent.cycle import nccl_ras
from ft_launcher.agent.cycle.nccl_ras import NcclRas, RasWaits, address_in
from ft_launcher.node.monitors.rank_report import RankReport
from rank_monitor.contract.wire.launcher_messages import Verdict
from tests.nccl_ras_server import Serve, Server
from tests.patience import patient, until
from tests.ports import free_port

ANSWERS = Path(__file__).parents[3] / "data" / "nccl_ras"
DEAD = "dead.json"
RANKS, PIDS = 4, (100, 101)
PATIENT = RasWaits(first_bytes_s=patient(30), answer_s=patient(30), restart_s=patient(30))
"""On a busy machine an answer may take longer than a restart would wait for it."""
IMPATIENT = replace(PATIENT, first_bytes_s=0.0)


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with NCCL."""
    monkeypatch.setattr(nccl_ras, "is_nccl_available", lambda: True)


def asked(ras: NcclRas) -> NcclRas:
    ras.ask(time.monotonic(), RANKS, PIDS)
    return ras


def status(name: str) -> Serve:
    """Answers as NCCL does: line by line, then the status, then it closes the connection."""
    body = (ANSWERS / name).read_bytes()
    knows_json = name.endswith(".json")
    start = body.index(b"{") if knows_json else body.index(b"NCCL version")

    def serve(connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            for line in lines:
                command = line.strip().upper()
                if command == b"VERBOSE STATUS":
                    break
                if command.startswith(b"CLIENT PROTOCOL "):
                    connection.sendall(b"SERVER PROTOCOL 2\n")
                elif command.startswith(b"TIMEOUT ") or (knows_json and command == b"SET FORMAT JSON"):
                    connection.sendall(b"OK\n")
                else:
                    connection.sendall(b"ERROR: Unknown command " + line)
        connection.sendall(body[start:])
        connection.shutdown(socket.SHUT_RDWR)

    return serve


def silent(connection: socket.socket) -> None:
    """A rank that is stopped: its kernel takes the connection."""


def torn(connection: socket.socket) -> None:
    """A rank that ends while it answers."""
    connection.sendall((ANSWERS / DEAD).read_bytes()[:400])
    connection.shutdown(socket.SHUT_RDWR)


def endless(connection: socket.socket) -> None:
    while True:
        connection.sendall(b" " * 65536)


def one_byte_at_a_time(connection: socket.socket) -> None:
    stop = time.monotonic() + patient(60)
    while time.monotonic() < stop:
        connection.sendall(b" ")
        time.sleep(0.01)


@pytest.fixture
def waits() -> RasWaits:
    return PATIENT


@pytest.fixture
def ras(waits: RasWaits) -> Iterator[NcclRas]:
    one = NcclRas({}, True, waits)
    yield one
    one.close()


@pytest.fixture
def serve(ras: NcclRas) -> Iterator[Callable[..., Server]]:
    """Starts a server where the ranks' RAS would listen."""
    servers: list[Server] = []

    def start(*functions: Serve) -> Server:
        host, port = ras.variables()[nccl_ras.ADDRESS].split(":")
        servers.append(Server((host, int(port)), *functions))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize("name", ["dead.json", "dead.txt"])
def test_the_answer_of_a_new_and_of_an_old_release(name: str, ras: NcclRas, serve: Callable[..., Server]) -> None:
    serve(status(name))
    view = asked(ras).view()
    assert view is not None and [(peer.pid, peer.is_dead) for peer in view.missing] == [(101, True)]
    assert view.answered_at > 0


@pytest.mark.parametrize("waits", [IMPATIENT])
def test_another_rank_answers_where_one_is_stopped_or_ends(ras: NcclRas, serve: Callable[..., Server]) -> None:
    serve(silent, torn, status(DEAD))
    view = asked(ras).view()
    assert view is not None and view.processes == 4


@pytest.mark.parametrize("waits", [IMPATIENT])
def test_one_that_is_late_may_still_answer_beside_others(ras: NcclRas, serve: Callable[..., Server]) -> None:
    first: list[socket.socket] = []
    serve(first.append, lambda second: status(DEAD)(first[0]), silent)
    assert asked(ras).view() is not None


def test_all_connections_are_made_before_a_restart_goes_on() -> None:
    assert nccl_ras.CONNECTIONS * RasWaits().first_bytes_s < RasWaits().restart_s


@pytest.mark.parametrize("waits", [replace(PATIENT, first_bytes_s=0.05, answer_s=0.5)])
@pytest.mark.parametrize("function", [silent, torn, endless, one_byte_at_a_time])
def test_no_answer(function: Serve, ras: NcclRas, serve: Callable[..., Server]) -> None:
    serve(function)
    assert asked(ras).view() is None


def test_nobody_listens(ras: NcclRas) -> None:
    assert asked(ras).view() is None


@pytest.mark.parametrize("waits", [replace(PATIENT, restart_s=0.0)])
def test_a_restart_does_not_wait_for_one_that_is_silent(ras: NcclRas, serve: Callable[..., Server]) -> None:
    server = serve(silent)
    assert asked(ras).view() is None
    until_connected(server, 1)  # it would still answer


def test_without_a_thread_there_is_no_answer_and_no_wait_for_one(ras: NcclRas, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    asked(ras)
    monkeypatch.setattr(threading.Event, "wait", lambda event, timeout=None: event.is_set() or pytest.fail("it waits"))
    assert ras.view() is None


def test_one_question_stands_for_all_ranks(ras: NcclRas, serve: Callable[..., Server]) -> None:
    server = serve(status(DEAD))
    now = time.monotonic()
    ras.ask(now, RANKS, PIDS)
    ras.ask(now + 1.0, RANKS, PIDS)
    assert ras.view() is not None and server.connections == 1
    ras.ask(now + 10.0, RANKS, PIDS, again_s=60.0)
    assert server.connections == 1
    ras.ask(now + 10.0, RANKS, PIDS)
    assert ras.view() is not None and server.connections == 2
    ras.begin_cycle()
    assert ras.view() is None


def test_no_second_thread_reads_an_answer_beside_the_first(ras: NcclRas, serve: Callable[..., Server]) -> None:
    """One of the last cycle may still read what a stranger sends without end."""
    strangers: list[socket.socket] = []
    server = serve(strangers.append, status(DEAD))
    asked(ras)
    until_connected(server, 1)
    ras.begin_cycle()
    assert asked(ras).view() is None
    assert server.connections == 1
    until(lambda: bool(strangers), "its turn")
    strangers[0].shutdown(socket.SHUT_RDWR)
    until(lambda: asked(ras).view() is not None, "the answer to a question of this cycle")


def until_connected(server: Server, count: int) -> None:
    until(lambda: server.connections >= count, f"{count} connections")
    assert server.connections == count


@pytest.mark.parametrize(("ranks", "is_read"), [(RANKS, False), (2048, True)])
def test_an_answer_is_as_long_as_the_job_is_large(
    ranks: int, is_read: bool, ras: NcclRas, serve: Callable[..., Server]
) -> None:
    answer = (ANSWERS / DEAD).read_bytes()

    def longer(connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:  # one that is closed with a line unread is reset, and its answer lost
            next(line for line in lines if line.strip().upper() == b"VERBOSE STATUS")
        connection.sendall(answer + b" " * (2 << 20))
        connection.shutdown(socket.SHUT_RDWR)

    serve(longer)
    ras.ask(time.monotonic(), ranks, PIDS)
    assert (ras.view() is not None) == is_read


def test_an_answer_about_another_job_is_none(ras: NcclRas, serve: Callable[..., Server]) -> None:
    """The user set one address for two jobs."""
    serve(status(DEAD))
    ras.ask(time.monotonic(), RANKS, (900, 901))
    assert ras.view() is None


def test_since_when_ranks_hang() -> None:
    """An answer to a suspicion that passed before they did says nothing of the hang."""
    verdict = Verdict(0, 0, 100, "section:step", 5.0, 5.5, False, 7, {}, "", "", [], {}, True)
    warned = replace(verdict, waited_s=1.0, condemned=False)
    found = [RankReport(verdict=verdict, verdict_at=100.0), RankReport(verdict=warned, verdict_at=100.0), RankReport()]
    assert nccl_ras.hung_for_s(found, 101.0) == 6.5
    assert nccl_ras.hung_for_s([RankReport()], 101.0) == nccl_ras.AGAIN_S


def test_each_job_has_a_port_that_its_ranks_alone_can_share(ras: NcclRas) -> None:
    other = NcclRas({}, True)
    assert other.variables() != ras.variables()
    host, port = ras.variables()[nccl_ras.ADDRESS].split(":")
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind((host, int(port)))
    servers = [Server((host, int(port)), silent) for _ in range(2)]  # two ranks
    for server in servers:
        server.close()
    other.close()


def test_without_a_descriptor_there_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", no_socket)
    ras = NcclRas({}, True)
    assert ras.variables() == {}
    ras.close()


def test_an_address_of_the_user_is_used_and_left_as_it_is() -> None:
    port = free_port()
    server = Server(("127.0.0.1", port), status(DEAD))
    ras = NcclRas({nccl_ras.ADDRESS: f"localhost:{port}"}, True)
    assert ras.variables() == {}
    assert asked(ras).view() is not None
    ras.close()
    server.close()


@pytest.mark.parametrize(
    ("environ", "is_wanted", "has_nccl"),
    [
        ({nccl_ras.ENABLE: "0"}, True, True),
        ({}, False, True),
        ({}, True, False),
        ({nccl_ras.ADDRESS: "x:y"}, True, True),
    ],
    ids=["switched off in NCCL", "--ft-flight-recorder=off", "no NCCL", "no address"],
)
def test_nothing_is_set_nor_asked(
    environ: dict[str, str], is_wanted: bool, has_nccl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_ras, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("it is asked"))
    ras = NcclRas(environ, is_wanted)
    assert ras.variables() == {}
    assert asked(ras).view() is None
    ras.close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:12345", ("localhost", 12345)),
        (" 10.0.0.1:80 ", ("10.0.0.1", 80)),
        ("[::1]:12345", ("::1", 12345)),
        ("node7", ("node7", 28028)),
        ("", None),
        ("host:port", None),
        ("host:0", None),
        (f"host:{'9' * 5000}", None),
    ],
)
def test_addresses(text: str, address: tuple[str, int] | None) -> None:
    assert address_in(text) == address
