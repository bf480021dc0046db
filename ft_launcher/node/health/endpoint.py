"""Asks a health checker that the operator runs on this node. A checker that cannot be reached is `unknown`: an
operator's daemon that is down must not make nodes leave the job.

Two protocols:
- `line:///path` is a Unix socket. `check` is written to it, and the answer is one line: `ok` or `unhealthy`, and a
  reason.
- All other endpoints (`host:port`, `unix:///path`, `/path`) speak gRPC: the standard grpc.health.v1, else the service
  of NVIDIA's daemon.

Runs in the process of a check (`decide/health/check.py`). The only file that imports grpc. The three messages are so
simple that they are read here, and no package for protobuf is needed.

An example of the first protocol: the checker at `line:///run/node_health` reads "check" and answers "unhealthy fan 3".
The finding is "unhealthy" with the reason "line:///run/node_health: fan 3", and the node leaves the job.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from itertools import islice

from ft_launcher.decide.health.check import Answer, Finding, Task

LINE = "line://"
"""How an endpoint of the first protocol begins. `node_health.py` reads it, too: only the other one needs grpc."""
_HEALTH = "/grpc.health.v1.Health/Check"
"""The standard method. The request is empty: it asks for the server as a whole."""
_NVHCD = "/nvhcd.HealthCheckService/RunHealthCheck"
"""The method of NVIDIA's health check daemon (nvhcd)."""
_NVHCD_REQUEST = b"\x0a\x0a--no-slurm"
"""Field 1, a text of ten bytes: the argument that NVIDIA's launcher gives."""
# ServingStatus of grpc.health.v1.
_SERVING: dict[object, Finding] = {
    0: ("unknown", "UNKNOWN"),
    1: ("ok", "SERVING"),
    2: ("unhealthy", "NOT_SERVING"),
    3: ("unknown", "SERVICE_UNKNOWN"),
}


def check(task: Task) -> Answer:
    """Returns the finding of the checker at `task.work["endpoint"]`, which has `task.work["timeout_s"]` seconds to
    answer. The check "endpoint"."""
    endpoint, timeout_s = task.work["endpoint"], task.work["timeout_s"]
    task.say(endpoint)
    if endpoint.startswith(LINE):
        state, reason = _ask_line(endpoint[len(LINE) :], timeout_s)
    elif endpoint.startswith("/"):
        state, reason = _ask_grpc(f"unix://{endpoint}", timeout_s)
    else:
        state, reason = _ask_grpc(endpoint, timeout_s)
    return [(state, f"{endpoint}: {reason}")], {}


def _ask_line(path: str, timeout_s: float) -> Finding:
    """Asks a checker that answers with a line over a Unix socket. Blocks for `timeout_s` at each step of the exchange.

    A checker that is not there, does not answer or breaks off is `unknown`, with the system's words as the reason.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            connection.sendall(b"check\n")
            with connection.makefile("rb") as answer:
                # Bounded, since another program writes it and may never end the line.
                line = answer.readline(4096)
    except OSError as error:
        return "unknown", str(error)
    return line_says(line.decode(errors="replace"))


def line_says(line: str) -> Finding:
    """Returns the finding in a checker's line, such as "unhealthy: fan 3". Pure. A line that begins with neither word
    is `unknown`: an operator's mistake must not empty the cluster."""
    state, _, reason = line.strip().partition(" ")
    state = state.lower().rstrip(":")
    if state == "ok":
        return "ok", reason.strip()
    if state == "unhealthy":
        return "unhealthy", reason.strip() or "says it is unhealthy"
    return "unknown", f"answers {line.strip()!r}, which is neither ok nor unhealthy"


def _ask_grpc(target: str, timeout_s: float) -> Finding:
    """Asks a gRPC server for grpc.health.v1; if it lacks that service, for the one of NVIDIA's daemon."""
    import grpc

    # A checker of this node is not behind a proxy.
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        for method, request, says in ((_HEALTH, b"", health_says), (_NVHCD, _NVHCD_REQUEST, nvhcd_says)):
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
            try:
                return says(call(request, timeout=timeout_s))
            except grpc.RpcError as error:
                failure: Finding = ("unknown", f"{error.code().name}: {error.details()}")
                # Only a server that lacks this service is asked for the next one.
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    break
        return failure


def health_says(message: bytes) -> Finding:
    """Returns the finding in a HealthCheckResponse of grpc.health.v1, whose field 1 is the status. Pure."""
    status = dict(_fields(message)).get(1, 0)
    return _SERVING.get(status, ("unknown", f"status {status!r}"))


def nvhcd_says(message: bytes) -> Finding:
    """Returns the finding in a HealthCheckResponse of NVIDIA's daemon. Pure.

    Its fields: 1 success, 2 exit_code, 3 output (JSON with a `fail_count`), 4 error.
    """
    fields = dict(_fields(message))
    if not fields:
        return "unknown", "an empty answer"
    output, error = (_text(fields.get(number, b"")) for number in (3, 4))
    if not fields.get(1):
        return "unhealthy", f"exit code {fields.get(2, 0)!r}: {error or output}"
    try:
        report = json.loads(output)
        fail_count = report.get("fail_count", 0)
        failed_checks = report.get("failed_checks", [])
    except (ValueError, AttributeError):
        return "unknown", f"succeeds, with an output that is not its JSON: {output}"
    if fail_count:
        return "unhealthy", f"{fail_count} checks failed: {failed_checks}"
    return "ok", ""


def _text(value: object) -> str:
    """Returns a field's value as text of 300 characters at most."""
    if isinstance(value, bytes):
        return value.decode(errors="replace").strip()[:300]
    return str(value)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields number and value of each field of a protobuf message.

    Stops at a field that is cut short or has a wire type that these messages do not use.
    """
    remaining = iter(message)
    while True:
        key = _varint(remaining)
        value = _varint(remaining)
        if key is None or value is None:
            return
        # Wire types of protobuf: 0 is a varint, 2 has its length before it.
        if key & 7 == 0:
            yield key >> 3, value
        elif key & 7 == 2:
            yield key >> 3, bytes(islice(remaining, value))
        else:
            return


def _varint(data: Iterator[int]) -> int | None:
    """Reads the next number as protobuf writes it: in groups of 7 bits, lowest first, with bit 8 set in all but the
    last byte. None: the data has ended."""
    number = shift = 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number
    return None
