"""Unix sockets of whole messages (SOCK_SEQPACKET), with descriptors passed along (SCM_RIGHTS).

Launcher, monitor and client use it. Bytes and credentials are handled here; messages are not interpreted. Nothing here
blocks on the sockets that it makes, which are all non-blocking.
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

from rank_monitor.contract.wire.codec import MAX_MESSAGE

MAX_PATH_BYTES = 107
"""Of the path of a socket: `sun_path` has 108 bytes with the final NUL (unix(7))."""
BACKLOG = 16
"""Connections that wait to be accepted. One is expected; with a full queue `connect` fails at once (EAGAIN), and the
client tries again."""
_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid, gid."""


@dataclass(frozen=True)
class Peer:
    """The process at the other end, as the kernel reports it (SO_PEERCRED)."""

    pid: int
    uid: int


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """A context that gives a name of `path` for bind or connect: the path itself, or where that is too long for the
    kernel, a short name through a descriptor of its folder.

    The short name is valid inside the context only.
    """
    if len(os.fsencode(path)) <= MAX_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path) -> socket.socket:
    """Returns a non-blocking listening socket at `path`, which this user alone may connect to (mode 0600).

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
    """Connects to the listener at `path`. Returns a non-blocking socket; the call does not block either.

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
    """Returns two connected, non-blocking sockets."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


def peer(connection: socket.socket) -> Peer:
    """Returns the credentials of the process that made the other end: a process that inherited it is not told apart."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid)


def send(connection: socket.socket, data: bytes, descriptors: tuple[int, ...] = ()) -> bool:
    """Sends one whole message if that is possible at once. Does not block on a non-blocking socket.

    Returns:
        Whether the message was sent; False: the queue is full.

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
    """Receives one whole message. Does not block on a non-blocking socket.

    Returns:
        None when nothing waits. Otherwise the message and the descriptors that arrived with it, which the caller
        closes. A message is cut at `MAX_MESSAGE` + 1 bytes, so that `codec.decode` refuses one that is too large. Empty
        bytes: the other end has closed, or the message is empty; `closed` tells the two apart.

    Raises:
        OSError: the connection broke.
    """
    try:
        if max_descriptors == 0:
            return connection.recv(MAX_MESSAGE + 1), []
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE + 1, max_descriptors)
    except BlockingIOError:
        return None
    # `recv_fds` does not ask for MSG_CMSG_CLOEXEC: the descriptors arrive inheritable.
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return data, descriptors


def closed(connection: socket.socket) -> bool:
    """Whether the other end has closed: `receive` returns the same for that and for an empty message."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return any(events & (select.POLLHUP | select.POLLRDHUP | select.POLLERR) for _, events in poll.poll(0))
