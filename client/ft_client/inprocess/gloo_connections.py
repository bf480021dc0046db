"""Finds the connections of gloo and of the round's store in this process, and shuts them down.

`abort.py` calls this file; `restart/coordination.py` names the port that is spared. Nothing here knows of groups.

Why by the sockets: torch cannot end a collective of gloo. `abort` and `shutdown` of its groups do nothing, and a new
timeout applies from the next collective on. But a connection that is shut down fails in every call that waits for it,
within milliseconds.

How they are found: gloo waits for all sockets of a group in one thread, by epoll. /proc shows the thread's name, the
epoll descriptor in its present system call, and the descriptors that this one watches.

What must not happen:

- A socket is shut down and never closed here: its owner closes it, and a number that is closed twice may be another
  file's by then. `close_cut` closes copies of the sockets only.
- A listening socket stays as it is: gloo ends the process when accepting fails. A wait there for a lost peer gets a
  connection in the peer's place (`stand_in_for_peers`).
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from rank_monitor.contract.processes import proc
from rank_monitor.contract.processes.descriptor import socket_copy

_TASKS = Path("/proc/self/task")
_DESCRIPTORS = Path("/proc/self/fd")
_DETAILS = Path("/proc/self/fdinfo")
_GLOO_LOOP = "gloo_tcp_loop"
"""The name of the thread in which gloo waits for all sockets of one group."""
_UNNAMED_LOOP = ["0x40", "0xa"]
"""With torch 2.6 that thread has no name. It is known by the arguments of its epoll_wait: 64 events, 10 ms."""
_LOOKS = 5
"""How often a thread is read. A thread that runs at that moment shows no system call in /proc, and is read again."""
_LOOP_SEEN_S = 1.0
"""Seconds until a named loop must have been seen waiting: a hundred times the 10 ms that it waits at a time."""
_LOOK_AGAIN_S = 0.0005
"""Seconds between two readings: a twentieth of these 10 ms, so that one of the next readings finds the loop waiting."""
_CONNECTED_S = 1.0
"""The listener is in this process: the kernel accepts the connection at once unless its queue is full."""
_PEER = struct.Struct("=q")
"""What a peer of gloo sends first: its number, in the byte order of the host."""
_spared: set[int] = set()
"""Ports whose connections `cut_store` leaves alone."""
_held: dict[int, socket.socket] = {}
"""Copies of the sockets that were cut, by inode. They keep the connections open until `close_cut`."""
_LEFT_FOR_OTHERS = 64
"""Descriptors that stay free for the rest of the process while connections stand in for peers."""


def spare(port: int) -> None:
    """Excludes connections to this port from `cut_store`: the store of the coordination is there."""
    _spared.add(port)


def cut_gloo() -> list[str]:
    """Ends the waits in the gloo groups of this process: each of their connections reads end of file.

    Only the receiving side of a connection is shut down, and a copy keeps it open after gloo has closed it, until
    `close_cut`. So no send fails, on this rank or the peer's, before end of file was read: gloo never wakes a wait for
    a send that failed. The peer reads end of file when it cuts its own side.

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
            if inode not in _held:
                _shut_down(descriptor, partial(_has_inode, inode), socket.SHUT_RD, partial(_held.setdefault, inode))
    return left


def close_cut() -> None:
    """Closes the copies of gloo's sockets that were cut. Called when no rank waits for a connection any more.

    Where unread data is left, the kernel resets the connection. If a peer on a busy machine has not read its own data
    to the end yet, the send with which its gloo answers fails then, and gloo never ends the wait for that send.
    """
    while _held:
        _held.popitem()[1].close()


def stand_in_for_peers(size: int) -> None:
    """Connects to each listening socket of gloo in this process, as each peer of a group of `size` would, and closes.

    A wait for a peer that will never connect ends so: the connection is there, and is at its end. A peer first sends
    its number in 8 bytes: a number that the listener counted, or the peer's rank. Gloo keeps connections that it does
    not wait for, and ends the process when it can open no more files; hence the bound on their number.
    """
    for thread in _gloo_loops():
        poll = _polled_by(thread)
        if poll is not None:
            for descriptor, inode in _watched(poll):
                address = _listens_at(descriptor, inode)
                if address is not None:
                    for peer in range(min(size, _may_open() - _LEFT_FOR_OTHERS)):
                        with suppress(OSError), socket.create_connection(address, _CONNECTED_S) as connection:
                            connection.sendall(_PEER.pack(peer))


def cut_store(port: int) -> int:
    """Shuts down the connections of this process to `port` of any host, unless it is spared.

    Returns:
        How many there were.
    """
    if port in _spared:
        return 0
    own = proc.own_descriptors()
    return sum(_shut_down(descriptor, lambda found: found.getpeername()[1] == port) for descriptor in own)


def _gloo_loops() -> list[Path]:
    """Returns the folders in /proc of the threads in which gloo waits, one for each group."""
    loops = []
    of_python = {str(thread.native_id) for thread in threading.enumerate()}
    for task in _TASKS.iterdir():
        with suppress(OSError):  # a thread that has just ended
            if (task / "comm").read_text().strip() == _GLOO_LOOP or (
                task.name not in of_python and _waits_as_gloo(task)
            ):
                loops.append(task)
    return loops


def _waits_as_gloo(thread: Path) -> bool:
    """Returns whether a thread waits for events as gloo does, by the arguments of its present system call."""
    for _ in range(_LOOKS):
        fields = (thread / "syscall").read_text().split()
        if fields != ["running"]:
            return fields[3:5] == _UNNAMED_LOOP and _is_poll(int(fields[1], 16))
        time.sleep(_LOOK_AGAIN_S)
    return False


def _is_poll(descriptor: int) -> bool:
    """Returns whether a descriptor of this process is one of epoll."""
    try:
        return (_DESCRIPTORS / str(descriptor)).readlink().name == "anon_inode:[eventpoll]"
    except OSError:
        return False


def _polled_by(thread: Path) -> int | None:
    """Returns the epoll descriptor for which a thread waits: the first argument of its present system call.

    Blocks up to 1 s, while the thread is not in that call. None where it is not seen there, or has ended.
    """
    deadline = time.monotonic() + _LOOP_SEEN_S
    while time.monotonic() < deadline:
        try:
            fields = (thread / "syscall").read_text().split()
        except OSError:
            return None
        with suppress(ValueError, IndexError):
            descriptor = int(fields[1], 16)
            if _is_poll(descriptor):
                return descriptor
        time.sleep(_LOOK_AGAIN_S)
    return None


def _watched(poll: int) -> Iterator[tuple[int, int]]:
    """Yields the descriptors that an epoll descriptor watches, each with its inode (proc_pid_fdinfo(5))."""
    with suppress(OSError):
        for line in (_DETAILS / str(poll)).read_text().splitlines():
            if line.startswith("tfd:"):
                yield int(line.split()[1]), int(line.partition("ino:")[2].split()[0], 16)


def _may_open() -> int:
    """Returns how many more descriptors this process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        allowed = sys.maxsize
    else:
        allowed = limit
    return allowed - len(proc.own_descriptors())


def _listens_at(descriptor: int, inode: int) -> tuple[str, int] | None:
    """Returns the address of a listening TCP socket; None if the descriptor is not one, or has another inode by now."""
    with suppress(OSError), socket_copy(descriptor) as found:
        is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and _has_inode(inode, found) and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            host, port = found.getsockname()[:2]
            return host, port
    return None


def _has_inode(inode: int, found: socket.socket) -> bool:
    """Returns whether a socket is still the one that was seen: its descriptor may have been closed and used again."""
    return os.fstat(found.fileno()).st_ino == inode


def _shut_down(
    descriptor: int,
    is_meant: Callable[[socket.socket], bool],
    how: int = socket.SHUT_RDWR,
    keep: Callable[[socket.socket], object] = socket.socket.close,
) -> bool:
    """Shuts down a TCP connection, if the descriptor is one and `is_meant` returns true for it.

    Args:
        descriptor: a descriptor of this process, of any kind.
        is_meant: asked about a copy of the socket.
        how: which side is shut down, as `socket.shutdown` has it.
        keep: gets the copy of the socket, after the connection was shut down.

    Returns:
        Whether a connection was shut down.
    """
    with ExitStack() as unless_kept, suppress(OSError):
        connection = unless_kept.enter_context(socket_copy(descriptor))
        connected = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()
        if connected and is_meant(connection):
            connection.shutdown(how)
            unless_kept.pop_all()
            keep(connection)
            return True
    return False
