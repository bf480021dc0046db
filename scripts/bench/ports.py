"""Free ports of this machine.

Imports nothing of the benchmark: `fork_ranks`, which launchers run by its path, needs it too.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_port(count: int = 1) -> int:
    """The first of `count` ports in a row on 127.0.0.1 that nobody uses now."""
    while True:
        with ExitStack() as held:
            first = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = int(first.getsockname()[1])
            try:
                for offset in range(1, count):
                    held.enter_context(socket.create_server(("127.0.0.1", port + offset)))
            except (OSError, OverflowError):
                continue
            return port
