"""The standard library's HTTP server at a socket that is listened on already, with a bound on its connections and
threads.

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
_FREE_S = 2.0
"""How long a connection waits for a thread (seconds). That of an ended connection is free within it: `/events` writes
every second, and finds out."""
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class HttpServer(ThreadingMixIn, BaseServer):
    """Answers each connection in a thread. At `most_connections` the oldest is ended for a new one, so that clients
    that are slow on purpose cannot keep others out. There are no more threads than that: where all are busy with
    answers, whose connections may be gone, a new connection gets code 503.

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
        self._free = threading.BoundedSemaphore(most_connections)
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

    def process_request(self, request: Any, client_address: Any) -> None:
        """Has a connection answered in a thread, if there is one."""
        if not self._free.acquire(timeout=_FREE_S):
            with contextlib.suppress(OSError):
                request.sendall(_BUSY)
                request.recv(65536, socket.MSG_DONTWAIT)  # what is left unread would take the answer away
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

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
