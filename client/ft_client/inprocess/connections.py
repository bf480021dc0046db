"""The connections of gloo and of the ranks' store in this process, and how to cut them.

Torch has no way to end a collective of gloo: `abort` and `shutdown` of its groups do nothing, and a timeout that is
changed counts from the next collective on. A connection that is shut down fails in every call that waits for it, within
milliseconds, in this process and in the peer's. Sockets are shut down and never closed: their owners do that. A
socket that listens stays as it is, since gloo ends the process when accepting fails. Knows nothing of groups.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

_TASKS = Path("/proc/self/task")
_DESCRIPTORS = Path("/proc/self/fd")
_DETAILS = Path("/proc/self/fdinfo")
_GLOO_LOOP = "gloo_tcp_loop"  # the thread in which gloo waits for all sockets of one group
_LOOP_SEEN_S = 1.0  # it waits at most 10 ms at a time
_LOOK_AGAIN_S = 0.0005
_spared: set[int] = set()


def spare(port: int) -> None:
    """Never cuts a connection to this port: the ranks meet there."""
    _spared.add(port)


def cut_gloo() -> list[str]:
    """Shuts down the connections of all gloo groups of this process.

    Returns:
        What could not be found or cut, one sentence each.
    """
    left = []
    for thread in _gloo_loops():
        poll = _polled_by(thread)
        if poll is None:
            left.append(f"gloo's thread {thread.name} shows no sockets in /proc")
            continue
        for descriptor, inode in _watched(poll):
            _shut_down(descriptor, partial(_has_inode, inode))
    return left


def cut_store(port: int) -> int:
    """Shuts down the connections of this process to `port` of any host, unless it is spared.

    Returns:
        How many there were.
    """
    if port in _spared:
        return 0
    found = [int(entry.name) for entry in _DESCRIPTORS.iterdir()]
    return sum(_shut_down(descriptor, lambda found: found.getpeername()[1] == port) for descriptor in found)


def _gloo_loops() -> list[Path]:
    loops = []
    for task in _TASKS.iterdir():
        with suppress(OSError):  # a thread that has just ended
            if (task / "comm").read_text().strip() == _GLOO_LOOP:
                loops.append(task)
    return loops


def _polled_by(thread: Path) -> int | None:
    """The epoll descriptor that a thread waits for: the first argument of the system call it is in."""
    deadline = time.monotonic() + _LOOP_SEEN_S
    while time.monotonic() < deadline:
        try:
            words = (thread / "syscall").read_text().split()
        except OSError:
            return None
        with suppress(OSError, ValueError, IndexError):
            descriptor = int(words[1], 16)
            if (_DESCRIPTORS / str(descriptor)).readlink().name == "anon_inode:[eventpoll]":
                return descriptor
        time.sleep(_LOOK_AGAIN_S)
    return None


def _watched(poll: int) -> Iterator[tuple[int, int]]:
    """What an epoll descriptor watches: descriptors, each with its inode."""
    with suppress(OSError):
        for line in (_DETAILS / str(poll)).read_text().splitlines():
            if line.startswith("tfd:"):
                yield int(line.split()[1]), int(line.partition("ino:")[2].split()[0], 16)


def _has_inode(inode: int, found: socket.socket) -> bool:
    return os.fstat(found.fileno()).st_ino == inode


def _shut_down(descriptor: int, is_meant: Callable[[socket.socket], bool]) -> bool:
    """Shuts down a TCP connection, if the descriptor is one and it is the one that is meant.

    All looks are taken at a copy of the descriptor: the number may stand for something else a moment later.
    """
    try:
        copy = os.dup(descriptor)
    except OSError:
        return False
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return False
    with connection, suppress(OSError):
        connected = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()
        if connected and is_meant(connection):
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False
