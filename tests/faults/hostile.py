"""What a broken or hostile process can send to a monitor's socket, and put in the place of files that its launcher
reads. Runs inside a rank; then the rank goes on.

Written against the wire, not with the client: finds the rank's live connection among its descriptors.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from pathlib import Path

from rank_monitor.contract.wire.codec import VERSION

SOCKET_VARIABLE = "FT_RANK_MONITOR_IPC_SOCKET"
STACK_VARIABLE = "FT_STACK_FILE"
_HEADER = struct.Struct("<BBHIQ")
_ATTACH, _LIMITS, _CYCLE_END, _BYE, _SECTIONS, _SECTION_TIMES = 17, 18, 49, 51, 2, 25
_DEEP = b"[" * 900 + b"]" * 900


def _header(kind: int, sent_ns: int | None = None, version: int = VERSION) -> bytes:
    return _HEADER.pack(version, kind, 0, 7, time.monotonic_ns() if sent_ns is None else sent_ns)


def messages() -> list[bytes]:
    """One of every kind of nonsense."""
    return [
        b"",
        b"x",
        b"\0" * 16,
        _header(1, version=99),
        _header(200),
        _header(_ATTACH) + b"{not json",
        _header(_ATTACH) + b"[" * 20_000,
        _header(_ATTACH) + b'{"num_warmup_iterations": "many"}',
        _header(_LIMITS) + b'{"initial": 1, "subsequent": NaN, "sections": {}, "out_of_section": 1e999}',
        _header(_LIMITS) + b'{"initial": -1, "subsequent": 0, "sections": {"step": -5}, "out_of_section": null}',
        _header(_LIMITS) + b'{"unknown": 1}',
        _header(_LIMITS)
        + b'{"initial": 1, "subsequent": 1, "sections": {}, "out_of_section": 1, "state": {"a": '
        + _DEEP
        + b"}}",
        _header(_SECTION_TIMES) + b'{"sections": {"step": ' + _DEEP + b'}, "gpu": {}}',
        _header(_SECTIONS) + struct.pack("<qB", 1, 200) + b"\xff" * 40,
        _header(_CYCLE_END) + b"{}",
        _header(_BYE) + b"{}",
        _header(1, 1 << 63),
        os.urandom(1000),
        b"\1" * 150_000,
    ]


def live_connection() -> socket.socket:
    """A second handle of this process' connection to its monitor."""
    path = os.environ[SOCKET_VARIABLE]
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found = socket.socket(fileno=os.dup(int(entry.name)))
            if found.getpeername() == path:
                return found
            found.close()
    raise AssertionError("the rank is not connected to its monitor")


def send_nonsense() -> None:
    """On the live connection, as if the client were broken."""
    connection = live_connection()
    for message in messages():
        with contextlib.suppress(BlockingIOError):
            connection.send(message)
    connection.close()


def flood() -> None:
    """20 MB of good reports on the live connection, as fast as the monitor takes them."""
    connection = live_connection()
    report = _header(_SECTION_TIMES) + b'{"sections": {"step": "' + b"x" * 55_000 + b'"}, "gpu": {}}'
    connection.setblocking(True)
    for _ in range(20_000_000 // len(report)):
        connection.send(report)
    connection.setblocking(False)
    connection.close()


def connect_again() -> None:
    """Strangers beside the live connection: silent, talking nonsense, greeting properly, and too many of them.

    Raises:
        AssertionError: one of them took the place of the live connection.
    """
    live, strangers = live_connection(), []
    for message in [None, *messages(), _header(16) + b'{"pid": 1}'] * 2:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(os.environ[SOCKET_VARIABLE])
        if message is not None:
            with contextlib.suppress(OSError):
                stranger.send(message)
        strangers.append(stranger)
    for stranger in strangers:
        stranger.close()
    poll = select.poll()
    poll.register(live, select.POLLRDHUP)
    assert not poll.poll(0), "the live connection was closed"
    live.close()


HOSTILE_FILES = ("a FIFO", "a link to /dev/zero", "deep JSON", "a sparse file of 1 GiB")
ITERATION_FILE = "checkpoint_iteration"


def write_files() -> None:
    """One kind per rank, in the place of its error file, its stack file and the job's checkpoint-iteration file."""
    kind = HOSTILE_FILES[int(os.environ["RANK"]) % len(HOSTILE_FILES)]
    named = [os.environ["TORCHELASTIC_ERROR_FILE"], os.environ[STACK_VARIABLE], ITERATION_FILE]
    for path in map(Path, named):
        other = path.with_name(f"{path.name}.{os.getpid()}")
        if kind == "a FIFO":
            os.mkfifo(other)
        elif kind == "a link to /dev/zero":
            other.symlink_to("/dev/zero")
        elif kind == "deep JSON":
            other.write_text('{"message": ' + "[" * 100_000 + "]" * 100_000 + "}")
        else:
            other.touch()
            os.truncate(other, 1 << 30)
        other.replace(path)
