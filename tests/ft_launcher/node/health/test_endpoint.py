"""Checkers that somebody else runs, as real servers: a line on a Unix socket, gRPC on a port and on a Unix socket."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.decide.health.reading import Reading
from ft_launcher.node.health.endpoint import health_says, line_says, nvhcd_says
from tests.patience import patient

Check = Callable[..., Reading]


@contextlib.contextmanager
def line_server(path: Path, answer: bytes | None) -> Iterator[str]:
    """Reads a line and answers; None: never."""
    heard: list[bytes] = []
    let_go = threading.Event()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            heard.append(self.rfile.readline())
            if answer is None:
                let_go.wait()
            else:
                self.wfile.write(answer)

    with socketserver.ThreadingUnixStreamServer(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"line://{path}"
        let_go.set()
        server.shutdown()
        thread.join()
    assert heard == [b"check\n"]


@pytest.mark.parametrize(
    ("answer", "state", "reason"),
    [
        (b"ok\n", "ok", ""),
        (b"OK all fans turn\nmore", "ok", "all fans turn"),
        (b"unhealthy: fan 3 stands\n", "unhealthy", "fan 3 stands"),
        (b"unhealthy", "unhealthy", "says it is unhealthy"),
        (b"", "unknown", "neither ok nor unhealthy"),
        (b"HTTP/1.1 400 Bad Request\r\n", "unknown", "neither ok nor unhealthy"),
        (b"\x00\x00\x12\x04\xff" * 2000, "unknown", "neither ok nor unhealthy"),
    ],
)
def test_a_line_server(reading_of: Check, tmp_path: Path, answer: bytes, state: str, reason: str) -> None:
    with line_server(tmp_path / "s", answer) as endpoint:
        reading = reading_of("endpoint", node_health_check_endpoint=endpoint)
    assert reading.state == state
    assert reading.reason.startswith(endpoint)
    assert reason in reading.reason
    assert line_says(answer[:4096].partition(b"\n")[0].decode(errors="replace"))[0] == state


def test_a_line_server_that_never_answers(reading_of: Check, tmp_path: Path) -> None:
    with line_server(tmp_path / "s", None) as endpoint:
        reading = reading_of("endpoint", node_health_check_endpoint=endpoint, health_timeout=patient(2.0))
    assert (reading.state, reading.reason) == ("unknown", f"{endpoint}: timed out")


@pytest.mark.parametrize("place", ["line://{}/nobody", "unix://{}/nobody", "{}/nobody", "127.0.0.1:9", "http://x y"])
def test_nobody_there(reading_of: Check, tmp_path: Path, place: str) -> None:
    assert reading_of("endpoint", node_health_check_endpoint=place.format(tmp_path)).state == "unknown"


grpc: Any = pytest.importorskip("grpc")
health: Any = pytest.importorskip("grpc_health.v1.health")
protocol: Any = pytest.importorskip("grpc_health.v1.health_pb2")
stubs: Any = pytest.importorskip("grpc_health.v1.health_pb2_grpc")


@pytest.fixture
def grpc_server(tmp_path: Path) -> Iterator[Callable[[Any], dict[str, str]]]:
    """Registers with the server and starts it -> its addresses, by kind."""
    server = grpc.server(futures.ThreadPoolExecutor(2))

    def start(register: Callable[[Any], None]) -> dict[str, str]:
        register(server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.add_insecure_port(f"unix://{tmp_path}/grpc")
        server.start()
        return {"port": f"127.0.0.1:{port}", "unix": f"unix://{tmp_path}/grpc", "path": f"{tmp_path}/grpc"}

    yield start
    server.stop(None).wait()


@pytest.mark.parametrize("kind", ["port", "unix", "path"])
@pytest.mark.parametrize(
    ("status", "state"),
    [("SERVING", "ok"), ("NOT_SERVING", "unhealthy"), ("UNKNOWN", "unknown")],
)
def test_a_grpc_health_server(
    reading_of: Check, grpc_server: Any, monkeypatch: pytest.MonkeyPatch, kind: str, status: str, state: str
) -> None:
    servicer = health.HealthServicer()
    servicer.set("", getattr(protocol.HealthCheckResponse, status))
    addresses = grpc_server(lambda server: stubs.add_HealthServicer_to_server(servicer, server))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    reading = reading_of("endpoint", node_health_check_endpoint=addresses[kind])
    assert (reading.state, reading.reason) == (state, f"{addresses[kind]}: {status}")


def message(success: bool, code: int = 0, output: str = "", error: str = "") -> bytes:
    """A response of NVIDIA's daemon on the wire."""
    texts = [bytes([number << 3 | 2, len(text)]) + text.encode() for number, text in ((3, output), (4, error)) if text]
    return (b"\x08\x01" if success else b"") + (bytes([0x10, code]) if code else b"") + b"".join(texts)


NVHCD = [
    (message(True, output='{"fail_count": 0}'), "ok", ""),
    (message(True, output='{"fail_count": 2, "failed_checks": ["ib", "gpu"]}'), "unhealthy", "2 checks failed"),
    (message(True, output="all good"), "unknown", "not its JSON: all good"),
    (message(False, code=42, output="x", error="no script"), "unhealthy", "exit code 42: no script"),
    (message(False, code=1), "unhealthy", "exit code 1"),
    (message(False), "unknown", "an empty answer"),
]


@pytest.mark.parametrize(("answer", "state", "reason"), NVHCD)
def test_nvidias_daemon(reading_of: Check, grpc_server: Any, answer: bytes, state: str, reason: str) -> None:
    asked: list[bytes] = []

    def run_health_check(request: bytes, context: Any) -> bytes:
        asked.append(request)
        return answer

    methods = {"RunHealthCheck": grpc.unary_unary_rpc_method_handler(run_health_check)}
    service = grpc.method_handlers_generic_handler("nvhcd.HealthCheckService", methods)
    addresses = grpc_server(lambda server: server.add_generic_rpc_handlers((service,)))
    reading = reading_of("endpoint", node_health_check_endpoint=addresses["unix"])
    assert reading.state == state
    assert reason in reading.reason
    assert asked == [b"\x0a\x0a--no-slurm"]


def test_a_grpc_server_without_any_health(reading_of: Check, grpc_server: Any) -> None:
    reading = reading_of("endpoint", node_health_check_endpoint=grpc_server(lambda server: None)["port"])
    assert reading.state == "unknown"
    assert "UNIMPLEMENTED" in reading.reason


def test_a_grpc_port_that_never_answers(reading_of: Check) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        reading = reading_of("endpoint", node_health_check_endpoint=endpoint, health_timeout=3.0)
    assert reading.state == "unknown"


def test_without_the_package(reading_of: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reading = reading_of("endpoint", node_health_check_endpoint="127.0.0.1:1")
    assert (reading.state, reading.reason) == ("unknown", "needs the package grpcio, which is not installed")
    with line_server(tmp_path / "s", b"ok\n") as endpoint:
        assert reading_of("endpoint", node_health_check_endpoint=endpoint).state == "ok"


@pytest.mark.parametrize("says", [health_says, nvhcd_says])
def test_messages_that_are_none(says: Callable[[bytes], tuple[str, str]]) -> None:
    """Bytes of anything give a state, and no error."""
    whole = message(True, 3, json.dumps({"fail_count": 1}), "error")
    pieces = [whole[start:end] for start in range(len(whole)) for end in range(start, len(whole) + 1)]
    for data in [*pieces, b"\xff" * 40, b"\x0d\x01", b"\x08\x80"]:
        assert says(data)[0] in ("ok", "unknown", "unhealthy")
