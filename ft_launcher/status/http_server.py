"""The standard library's HTTP server at a socket that is listened on already, with a bound on its connections.

Imported at the first connection: the import takes 25 ms, and most jobs are never asked.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from email.message import Message
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer, ThreadingMixIn
from typing import Any

from ft_launcher.status.server import Answer

_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'"
_ALWAYS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": f"{_POLICY}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class HttpServer(ThreadingMixIn, BaseServer):
    """Answers each connection in a thread. At `most_connections` the oldest is ended for a new one, so that clients
    that are slow on purpose cannot keep others out.

    Args:
        answer: of a request: its target, its headers and its connection.
        quiet_s: a connection on which nothing arrives for so long is closed (seconds).
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        listener: socket.socket,
        answer: Callable[[str, Message, socket.socket], Answer],
        most_connections: int,
        quiet_s: float,
    ) -> None:
        super().__init__(listener.getsockname(), _Handler)
        listener.setblocking(False)  # who has gone again before it is accepted holds nobody up
        self.socket = self._listener = listener
        self._most, self._lock = most_connections, threading.Lock()
        self._connections: list[socket.socket] = []
        self.answer, self.quiet_s = answer, quiet_s

    def fileno(self) -> int:
        """The descriptor that is readable when somebody connects."""
        return self._listener.fileno()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Takes one connection."""
        connection, where = self._listener.accept()
        with self._lock:
            self._connections.append(connection)
            while len(self._connections) > self._most:
                _end(self._connections.pop(0))
        return connection, where

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection that was answered."""
        with self._lock:
            if request in self._connections:
                self._connections.remove(request)
        _end(request)
        request.close()

    def close_request(self, request: Any) -> None:
        """Ends a connection for which there is no thread."""
        self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Does nothing: the client went away, and nobody else is concerned."""

    def end_connections(self) -> None:
        """Ends all connections; their threads end by that."""
        with self._lock:
            for connection in self._connections:
                _end(connection)


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer
    server_version, sys_version = "ft_launcher", ""

    def setup(self) -> None:
        self.request.settimeout(self.server.quiet_s)
        super().setup()

    def do_GET(self) -> None:
        answer = self.server.answer(self.path, self.headers, self.connection)
        self.send_response(answer.code)
        self.send_header("Content-Type", answer.kind)
        if answer.stream is None:
            self.send_header("Content-Length", str(len(answer.body)))
        for name, value in (_ALWAYS | dict(answer.headers)).items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)
            for piece in answer.stream or ():
                self.wfile.write(piece)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Writes nothing: what is asked for has no place in the log of a training."""


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
