"""How the ranks of one host find each other: all others reach rank 0 by a Unix socket, or none keeps a connection.

Tried once for each process group. Rank 0 listens in the abstract namespace, which belongs to a network namespace and
leaves no file behind, under a name that nobody can guess; both ends count only connections of their own user.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import TypeAlias

from ft_client.same_host import SameHost
from rank_monitor.contract import channel

Peers: TypeAlias = dict[int, socket.socket]

_HELLO = struct.Struct("=i")


def meet(
    rank: int, size: int, wait_s: float, from_rank0: Callable[[float], float], on_all: Callable[[bool], bool]
) -> SameHost | None:
    """The connections of this rank, if all ranks can reach rank 0; else None on all of them. Every rank calls it alike.

    Args:
        wait_s: what `SameHost` waits.
        from_rank0: what rank 0 gives, on every rank. Called once.
        on_all: whether all ranks give True. Called twice.
    """
    with ExitStack() as unless_all_meet:
        peers = _heard(size, from_rank0, on_all) if rank == 0 else _reached(rank, from_rank0, on_all)
        for peer in peers.values():
            unless_all_meet.enter_context(peer)
        if on_all(len(peers) == (size - 1 if rank == 0 else 1)):
            unless_all_meet.pop_all()
            return SameHost(peers, wait_s, spins=len(os.sched_getaffinity(0)) >= size)
    return None


def _heard(size: int, from_rank0: Callable[[float], float], on_all: Callable[[bool], bool]) -> Peers:
    """Rank 0's connections, by rank; empty: not all reach it."""
    name = float(1 + int.from_bytes(os.urandom(6), "big"))

    def listen(listener: socket.socket) -> None:
        listener.bind(_address(name))
        listener.listen(size)

    listener = _prepared(listen)
    with listener or nullcontext():
        from_rank0(name)
        return _accepted(listener, size) if on_all(listener is not None) and listener else {}


def _reached(rank: int, from_rank0: Callable[[float], float], on_all: Callable[[bool], bool]) -> Peers:
    """A connection to rank 0, which is told whose it is; empty: rank 0 is not to be reached from here."""
    name = from_rank0(0.0)

    def reach(connection: socket.socket) -> None:
        connection.connect(_address(name))
        if not _is_of_this_user(connection):
            raise PermissionError(errno.EACCES, "another user listens in the place of rank 0")
        connection.sendall(_HELLO.pack(rank))

    connection = _prepared(reach)
    on_all(connection is not None)
    return {0: connection} if connection else {}


def _prepared(prepare: Callable[[socket.socket], object]) -> socket.socket | None:
    """A Unix socket that never waits, prepared; None: there is none to be had, or it cannot be prepared."""
    with ExitStack() as unless_prepared:
        try:
            made = unless_prepared.enter_context(socket.socket(socket.AF_UNIX))
            made.setblocking(False)
            prepare(made)
        except OSError as error:
            _check_is_of_system(error)
            return None
        unless_prepared.pop_all()
        return made


def _check_is_of_system(error: OSError) -> None:
    """Raises it again if it is none of a system call's: a signal's handler may raise TimeoutError, say."""
    if error.errno is None:
        raise error


def _accepted(listener: socket.socket, size: int) -> Peers:
    """By rank, the connections that wait to be taken: all of them, for each rank has said that it has one."""
    peers: Peers = {}
    try:
        while len(peers) < size - 1:
            connection, _ = listener.accept()
            rank = _whose(connection)
            if 0 < rank < size and rank not in peers:
                peers[rank] = connection
            else:
                connection.close()
    except OSError as error:  # none is left, or this process may not open more files
        _check_is_of_system(error)
    return peers


def _whose(connection: socket.socket) -> int:
    """The rank that a connection says it is of; -1: it is of none of this user's."""
    connection.setblocking(False)
    try:
        said = connection.recv(_HELLO.size)
    except (BlockingIOError, ConnectionError):
        return -1
    return int(_HELLO.unpack(said)[0]) if _is_of_this_user(connection) and len(said) == _HELLO.size else -1


def _is_of_this_user(connection: socket.socket) -> bool:
    return channel.peer(connection).uid == os.geteuid()


def _address(name: float) -> str:
    return f"\0ft_client-{name:.0f}"
