"""Sends pickles between an agent and its rank: in sealed memory, through a socketpair that only the two have.

A pickle runs code when it is read, so it must not be where another process can write. It is in a memory file without a
name, which is sealed before it is sent, so that no process can change it any more; its descriptor goes to one receiver
through a socket without a name. A process that could reach either could also trace the two. What is sent is not
interpreted here.
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
    """A descriptor of the sender inside a pickle, by its index among those that are sent with it."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """The descriptor in the receiving process."""
        return _received[self._place]


class Tracker:
    """In a pickle: has the receiver use the sender's resource tracker, if there is one.

    A tracker of the receiver's own would remove the sender's shared memory when the receiver ends.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing import resource_tracker  # here: a fork has no more modules than its script imports

        descriptor = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
        if descriptor is None:
            return (Tracker, ())
        return (_share_tracker, (reduction.DupFd(descriptor),))


def _share_tracker(travelled: Inherited) -> None:
    from multiprocessing import resource_tracker

    resource_tracker._resource_tracker._fd = travelled.detach()  # type: ignore[attr-defined]


class _Receiver:
    """What multiprocessing calls of a `Popen` while it pickles: queues, locks and shared tensors can be sent."""

    DupFd = Inherited

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        """Adds a descriptor to those that are sent. Returns what stands for it in the pickle: its index."""
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
    """Sends pickles in sealed memory, with the descriptors that belong to them. May block.

    Raises:
        OSError: the other end is gone, or there is no memory for it.
    """
    travel = descriptors or []
    memory = os.memfd_create("ft_pickle", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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
    """Receives the next pickles; None when the other end closed. Their descriptors are kept for `Inherited`.

    Raises:
        BlockingIOError: nothing is there, on a connection that does not block.
        OSError: what was received is not sealed memory.
    """
    global _held
    head, found, _, _ = socket.recv_fds(connection, _HEAD.size, 1)
    if not head:
        return None
    if len(head) != _HEAD.size or len(found) != 1:
        raise OSError("this is not a sealed pickle")
    with os.fdopen(found[0], "rb") as memory:
        if fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("the memory of the pickle is not sealed")
        memory.seek(0)
        data = memory.read()
    (travel,) = _HEAD.unpack(head)
    _received.clear()
    while len(_received) < travel:
        _, more, _, _ = socket.recv_fds(connection, 1, _PER_MESSAGE)
        if not more:
            raise OSError("descriptors of the pickle are missing")
        _received.extend(more)
    for descriptor in _received:
        os.set_inheritable(descriptor, False)
    if _holds:
        _held = data
    return data


def hold() -> None:
    """Has `receive` keep what it receives for `resend`."""
    global _holds
    _holds = True


def let_go() -> None:
    """Ends `hold`, and frees what was kept."""
    global _holds, _held
    _holds, _held = False, None


def resend() -> int:
    """Returns a descriptor from which what `receive` kept can be received once more, by another process.

    Raises:
        OSError: a descriptor that came with it was closed meanwhile, or there is no memory for it.
    """
    assert _held is not None
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with sender:
        send(sender, _held, _received)
    return receiver.detach()
