"""Where threads leave what they found for the thread that waits in a selector. Knows nothing of what it is.

Used by the threads of `cycle/` that wait in the ranks' store.
"""

from __future__ import annotations

import contextlib
import queue
import socket
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Letters in the order in which they came."""

    def __init__(self) -> None:
        self._letters: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)

    def fileno(self) -> int:
        """Readable when `take` has something."""
        return self._bell.fileno()

    def put(self, letter: T) -> None:
        """Leaves a letter. Does not block; may be called in any thread, and does no harm after `close`."""
        self._letters.put(letter)
        with contextlib.suppress(OSError):
            self._ring.send(b"!")

    def take(self) -> list[T]:
        """Returns the letters since the last call. Does not block."""
        with contextlib.suppress(OSError):
            # Only empties the socket: the queue has the contents.
            self._bell.recv(64)
        return [self._letters.get_nowait() for _ in range(self._letters.qsize())]

    def close(self) -> None:
        """Closes the descriptors; letters that come later are read by nobody."""
        self._ring.close()
        self._bell.close()
