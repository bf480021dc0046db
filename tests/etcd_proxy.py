"""What may stand between a client and etcd: a TCP proxy that can lose an answer. Knows no protocol."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

from tests.etcd_server import HOST

_PIECE = 65536


class Proxy:
    """Passes on what comes to `endpoint`; a context manager.

    When `lose_next` is set, the next answer is taken from the server and the client's connection is closed instead.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server((HOST, 0))
        self._open: list[socket.socket] = []
        self.endpoint = f"{HOST}:{self._listener.getsockname()[1]}"
        self.lose_next = threading.Event()

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for one in (self._listener, *self._open):
            _end(one)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._connected, args=(near,), daemon=True).start()

    def _connected(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            far = socket.create_connection((HOST, self._port))
            self._open += [near, far]
            threading.Thread(target=self._pass_on, args=(near, far, False), daemon=True).start()
            self._pass_on(far, near, True)

    def _pass_on(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while (piece := source.recv(_PIECE)) and not (answers and self.lose_next.is_set()):
                target.sendall(piece)
            if piece:
                self.lose_next.clear()
        _end(source)
        _end(target)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
