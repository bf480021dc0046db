"""A server over TCP in the place of NCCL's RAS threads, which need a GPU."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from tests.patience import patient

Serve = Callable[[socket.socket], object]


class Server:
    """NCCL's side at an address: each connection is served by the next of some functions, the last one again."""

    def __init__(self, address: tuple[str, int], *serve: Serve) -> None:
        self.connections = 0
        self._serve = serve
        self._listener = socket.socket()
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as NCCL's sockets
            self._listener.setsockopt(socket.SOL_SOCKET, option, 1)
        self._listener.bind(address)
        self._listener.listen()
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._kept.append(connection)
                serve = self._serve[min(self.connections, len(self._serve) - 1)]
                self.connections += 1
                with suppress(OSError):
                    serve(connection)

    def close(self) -> None:
        for open_one in [self._listener, *self._kept]:
            with suppress(OSError):
                open_one.shutdown(socket.SHUT_RDWR)
            open_one.close()
        self._thread.join(patient(20))
