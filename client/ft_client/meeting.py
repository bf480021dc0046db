"""How the ranks of one host find each other: all others reach rank 0 by a Unix socket, or none keeps a connection.

Tried once for each process group. Rank 0 listens in the abstract namespace, which belongs to a network namespace and
leaves no file behind, under a name that nobody can guess; only its own user's connections count.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

from ft_client.same_host import SameHost

_HELLO = struct.Struct("=i")
_CREDENTIALS = struct.Struct("=3i")  # process, user, group: unix(7), SO_PEERCRED


def meet(
    rank: int, size: int, wait_s: float, from_rank0: Callable[[float], float], on_all: Callable[[bool], bool]
) -> SameHost | None:
    """The connections of this rank, if all ranks can reach rank 0; else None on all of them. Every rank calls it alike.

    Args:
        wait_s: what `SameHost` waits.
        from_rank0: what rank 0 gives, on every rank. Called once.
        on_all: whether all ranks give True. Called twice.
    """
    if rank == 0:
        with socket.socket(socket.AF_UNIX) as listener:
            from_rank0(_listen(listener, size))
            peers = _accepted(listener, size) if on_all(True) else {}
    else:
        peers = _reach(from_rank0(0.0), rank)
        on_all(bool(peers))
    if on_all(len(peers) == (size - 1 if rank == 0 else 1)):
        return SameHost(peers, wait_s, spins=len(os.sched_getaffinity(0)) >= size)
    for peer in peers.values():
        peer.close()
    return None


def _listen(listener: socket.socket, size: int) -> float:
    """The name under which it listens, as a float holds it; 0: it cannot."""
    name = float(1 + secrets.randbits(52))
    try:
        listener.bind(_address(name))
        listener.listen(size)
    except OSError:
        return 0.0
    listener.setblocking(False)
    return name


def _reach(name: float, rank: int) -> dict[int, socket.socket]:
    """A connection to rank 0, which is told whose it is; empty: rank 0 is not to be reached from here."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        connection.connect(_address(name))
        connection.sendall(_HELLO.pack(rank))
    except OSError:
        connection.close()
        return {}
    return {0: connection}


def _accepted(listener: socket.socket, size: int) -> dict[int, socket.socket]:
    """By rank, the connections that wait to be taken: all of them, for each rank has said that it has one."""
    peers: dict[int, socket.socket] = {}
    with suppress(BlockingIOError):
        while len(peers) < size - 1:
            connection, _ = listener.accept()
            rank = _whose(connection)
            if 0 < rank < size and rank not in peers:
                peers[rank] = connection
            else:
                connection.close()
    return peers


def _whose(connection: socket.socket) -> int:
    """The rank that a connection says it is of; -1: it is of none of this user's."""
    connection.setblocking(False)
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    try:
        said = connection.recv(_HELLO.size)
    except OSError:
        return -1
    return int(_HELLO.unpack(said)[0]) if user == os.geteuid() and len(said) == _HELLO.size else -1


def _address(name: float) -> str:
    return f"\0ft_client-{name:.0f}"
