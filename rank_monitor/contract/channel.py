"""The two ends of a Unix socket of whole messages (SOCK_SEQPACKET), and descriptors that travel on it.

Knows bytes and credentials, not what the messages mean. Nothing here blocks but what says so.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rank_monitor.contract.codec import MAX_MESSAGE

MAX_PATH_BYTES = 107
BACKLOG = 16
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Peer:
    """Who is at the other end, by the kernel's word (SO_PEERCRED)."""

    pid: int
    uid: int


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """`path`, or a short name for it through its folder's descriptor where it is longer than the kernel takes."""
    if len(os.fsencode(path)) <= MAX_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path) -> socket.socket:
    """A listening socket at `path` (mode 0600), not blocking.

    Raises:
        OSError: the path is taken or cannot be written.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with short_address(path) as name:
            listener.bind(name)
        path.chmod(0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def connect(path: Path) -> socket.socket:
    """A connection to the listener at `path`, not blocking from the start.

    Raises:
        OSError: nobody listens there, or its queue is full.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)
        with short_address(path) as name:
            connection.connect(name)
    except OSError:
        connection.close()
        raise
    return connection


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, neither blocking."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


def peer(connection: socket.socket) -> Peer:
    """Who is at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid)


def send(connection: socket.socket, data: bytes, descriptors: tuple[int, ...] = ()) -> bool:
    """Sends one whole message if that is possible at once.

    Returns:
        Whether it went out: False when the queue is full.

    Raises:
        OSError: the other end is gone.
    """
    try:
        if descriptors:
            socket.send_fds(connection, [data], list(descriptors))
        else:
            connection.send(data)
    except BlockingIOError:
        return False
    return True


def receive(connection: socket.socket, max_descriptors: int = 0) -> tuple[bytes, list[int]] | None:
    """Takes one whole message.

    Returns:
        The message, cut at `MAX_MESSAGE` + 1 bytes so that `codec.decode` refuses an oversized one, and the
        descriptors that came with it (the caller closes them); None when nothing waits. Empty bytes: the other end
        has closed.

    Raises:
        OSError: the connection broke.
    """
    try:
        if max_descriptors == 0:
            return connection.recv(MAX_MESSAGE + 1), []
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE + 1, max_descriptors)
    except BlockingIOError:
        return None
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return data, descriptors


def closed(connection: socket.socket) -> bool:
    """Whether the other end has closed; tells a true end from an empty message, which `receive` gives alike."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return any(events & (select.POLLHUP | select.POLLRDHUP | select.POLLERR) for _, events in poll.poll(0))
