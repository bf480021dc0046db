"""Pickles between an agent and a rank of its own: sealed memory, handed through a socketpair that only the two hold.

A pickle runs code when it is read, so none may lie where another process can write. A parcel lies in memory without a
name; it is sealed before it is sent, so that nobody can change it any more, and its descriptor goes to one receiver,
through a socket without a name. Whoever could reach either could trace the processes. Knows not what is sent.
"""

from __future__ import annotations

import fcntl
import io
import os
import socket
import struct
from multiprocessing import reduction
from multiprocessing.context import set_spawning_popen
from typing import Any

_HEAD = struct.Struct("!I")  # how many descriptors follow
_PER_MESSAGE = 250  # the kernel's limit is 253
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_received: list[int] = []
_holds = False
_held: bytes | None = None


class Inherited:
    """A descriptor of the sender's inside a pickle, by its number among those that travel with it."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """The descriptor, in the receiver."""
        return _received[self._place]


class Tracker:
    """In a pickle: the receiver uses the sender's tracker of shared memory, if it has one; its own would remove it."""

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing import resource_tracker  # here: a fork has no more modules than its script imports

        descriptor = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
        return (Tracker, ()) if descriptor is None else (_share_tracker, (reduction.DupFd(descriptor),))


def _share_tracker(travelled: Inherited) -> None:
    from multiprocessing import resource_tracker

    resource_tracker._resource_tracker._fd = travelled.detach()  # type: ignore[attr-defined]


class _Receiver:
    """What multiprocessing asks of the process that it pickles for: queues, locks and shared tensors can travel."""

    DupFd = Inherited

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        """A descriptor travels; returns its place."""
        self.descriptors.append(descriptor)
        return len(self.descriptors) - 1


def pack(*parts: Any) -> tuple[bytes, list[int]]:
    """The pickles of all parts, one after the other, as for a new process of multiprocessing.

    Returns:
        Bytes, and the descriptors that belong to them; these stay the caller's.

    Raises:
        Exception: a part cannot be pickled; what it is depends on the part.
    """
    file, receiver = io.BytesIO(), _Receiver()
    set_spawning_popen(receiver)  # type: ignore[arg-type]
    try:
        for part in parts:
            reduction.dump(part, file)
    finally:
        set_spawning_popen(None)
    return file.getvalue(), receiver.descriptors


def send(connection: socket.socket, data: bytes, descriptors: list[int] | None = None) -> None:
    """Sends a parcel.

    Raises:
        OSError: the other end is gone, or there is no memory for it.
    """
    travel = descriptors or []
    memory = os.memfd_create("ft_parcel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(memory, left) :]
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        socket.send_fds(connection, [_HEAD.pack(len(travel))], [memory])
        for first in range(0, len(travel), _PER_MESSAGE):
            socket.send_fds(connection, [b"d"], travel[first : first + _PER_MESSAGE])
    finally:
        os.close(memory)


def receive(connection: socket.socket) -> bytes | None:
    """The next parcel; None when the other end closed without one. Its descriptors are kept for `Inherited`.

    Raises:
        BlockingIOError: nothing is there, on a connection that does not block.
        OSError: what came is no sealed parcel.
    """
    global _held
    head, found, _, _ = socket.recv_fds(connection, _HEAD.size, 1)
    if not head:
        return None
    if len(head) != _HEAD.size or len(found) != 1:
        raise OSError("this is no parcel")
    with os.fdopen(found[0], "rb") as memory:
        if fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("the parcel is not sealed")
        memory.seek(0)
        data = memory.read()
    (travel,) = _HEAD.unpack(head)
    _received.clear()
    while len(_received) < travel:
        _, more, _, _ = socket.recv_fds(connection, 1, _PER_MESSAGE)
        if not more:
            raise OSError("descriptors of the parcel are missing")
        _received.extend(more)
    for descriptor in _received:
        os.set_inheritable(descriptor, False)
    if _holds:
        _held = data
    return data


def hold() -> None:
    """Has `receive` keep a parcel for `resend`."""
    global _holds
    _holds = True


def let_go() -> None:
    """Keeps no parcel any more."""
    global _holds, _held
    _holds, _held = False, None


def resend() -> int:
    """A descriptor at which the parcel that was received waits once more.

    Raises:
        OSError: a descriptor that came with it was closed meanwhile, or there is no memory for it.
    """
    assert _held is not None
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with sender:
        send(sender, _held, _received)
    return receiver.detach()
