"""Sends pickles between an agent and its rank: in sealed memory, through a socketpair that only the two have.

The only pickles that go from one process of ours to another: the Python API of the launcher starts a *function* as a
rank, as torch's `elastic_launch` does, and function, arguments and result must travel. The agent packs and sends
(`ft_launcher/node/ranks/`), the rank receives (`rank/start/function.py`), and the result goes back in the same way.
What is sent is not interpreted here.

**Why that is safe.** A pickle runs code when it is read, so it must not be where another process can write. So it lies
in a memory file without a name, which is sealed before it is sent: no process can change it any more. The descriptor of
that memory goes to one receiver, through a socket without a name. A process that could reach either could also trace
the two.

Descriptors that belong to the pickle (of queues, locks and shared tensors) are sent after it.
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

_HEAD = struct.Struct("!I")
"""The first message: how many descriptors follow."""
_PER_MESSAGE = 250
"""Descriptors in one message: the kernel's limit is 253 (unix(7))."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_received: list[int] = []
"""The descriptors that came with the last pickles; `Inherited` finds its own by index."""
_holds = False
_held: bytes | None = None
"""The last pickles that were received, kept between `hold` and `drop_held`."""


class Inherited:
    """A descriptor of the sender inside a pickle, by its index among those that are sent with it."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """Returns the descriptor in the receiving process. The name is multiprocessing's."""
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
    """Stands in for the `Popen` whose methods multiprocessing calls while it pickles: so queues, locks and shared
    tensors can be sent."""

    DupFd = Inherited

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        """Adds a descriptor to those that are sent. Returns what stands for it in the pickle: its index."""
        self.descriptors.append(descriptor)
        return len(self.descriptors) - 1


def pack(*parts: Any) -> tuple[bytes, list[int]]:
    """Returns the pickles of all parts, one after the other, as multiprocessing makes them for a new process.

    Returns:
        The bytes, and the descriptors that belong to them. The caller keeps and closes these.

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
        OSError: the other end is gone, or there is no memory for the pickles.
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
    """Returns the next pickles; None when the other end has closed. Their descriptors are stored for `Inherited`.

    Blocks until they are there, on a connection that blocks.

    Raises:
        BlockingIOError: nothing is there, on a connection that does not block.
        OSError: what was received is no sealed memory.
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
    """Has `receive` keep what it receives for `resend`: the process may have to start again by exec."""
    global _holds
    _holds = True


def drop_held() -> None:
    """Ends `hold`, and frees what was kept."""
    global _holds, _held
    _holds, _held = False, None


def resend() -> int:
    """Returns a descriptor from which another process can receive once more what `receive` kept.

    Raises:
        OSError: a descriptor that came with the pickles was closed meanwhile, or there is no memory for them.
    """
    assert _held is not None
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with sender:
        send(sender, _held, _received)
    return receiver.detach()
