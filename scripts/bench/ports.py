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
            port = 0
            try:
                for offset in range(count):
                    taken = held.enter_context(socket.socket())
                    taken.bind(("127.0.0.1", port + offset if offset else 0))
                    port = port or int(taken.getsockname()[1])
            except (OSError, OverflowError):
                continue
            return port
