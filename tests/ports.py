"""Ports of loopback that belong to the test that asked for them.

A port that was looked for and let go may be given to the next process that asks the kernel for one, before the test's
own server is there. So it stays bound here, by a socket that does not listen: a connection to it is refused, the kernel
gives it to nobody, and only a server that names it and sets SO_REUSEADDR, as servers do, can listen at it.
"""

from __future__ import annotations

import socket
from collections import deque
from contextlib import ExitStack

# Those of the last tests of this process: more than any test asks for, and few descriptors.
_held: deque[socket.socket] = deque(maxlen=128)


def free_port(count: int = 1) -> int:
    """The first of `count` ports in a row at which nobody but the caller's servers will listen."""
    while True:
        with ExitStack() as undo:
            taken = [undo.enter_context(socket.socket()) for _ in range(count)]
            taken[0].bind(("127.0.0.1", 0))
            first = int(taken[0].getsockname()[1])
            try:
                for offset in range(1, count):
                    taken[offset].bind(("127.0.0.1", first + offset))
            except (OSError, OverflowError):
                continue
            # Only now: a port that another holds in this way must not be found free.
            for held in taken:
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            undo.pop_all()
            _held.extend(taken)
            return first
