"""Answers GET requests at one listening socket, of TCP or in the file system, by the standard library's HTTP server.

`listening.py` makes one server for each place at which a job can be asked. This file knows connections, tokens and
codes; `answers.py` knows what to answer. Any program may reach the port, a web page in the user's browser included, so
each request is checked here before a handler sees it.

A job must never be slower because somebody asks: connections and threads are bounded, and no other part of the launcher
waits for them.

Threads: `ft_launcher status` accepts connections, from the making of the server until `close`; it is the only thread
until the first connection. Each connection gets a thread of its own, in which its request is read and the handler runs.
At most `MAX_CONNECTIONS` of these run handlers, and as many more wait for their turn, for `_FREE_S`.

    accept; beyond 32 connections the oldest is ended
      -> a thread of its own, where fewer than 64 live within 2 s; else 503
      -> its turn to answer, within 2 s; else 503
      -> the answer
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer, ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.wire import channel

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
"""Connections at a time, and threads that answer at a time. A new connection ends the oldest. Probes, Prometheus and a
few people need fewer."""
_WAITING = 512
"""Connections that the kernel holds until they are accepted. Beyond that a client tries again after a second."""
_QUIET_S = 10.0
"""Seconds without data after which a connection is closed."""
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'"
"""The content security policy of every answer: the page loads only its own script, style and icon, and asks only this
server."""
_ALWAYS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": f"{_POLICY}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_FREE_S = 2.0
"""How long a connection waits for a free thread (seconds). A thread of a connection that has been ended is free within
that time: `/events` writes every second, and notices."""
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
"""The answer where no thread is free."""


@dataclass(frozen=True)
class Answer:
    """The answer to one request.

    Attributes:
        body: the body, or its begin.
        kind: the content type.
        code: the status code.
        stream: further pieces of the body. Sent as they come, until the iterator ends or the client is gone.
    """

    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    code: int = 200
    stream: Iterator[bytes] | None = None


Handler = Callable[[str, Mapping[str, str]], Answer]
"""Path and parameters of a request -> answer. Called in a thread of the server, several at a time; may block."""


def as_file(path: str) -> socket.socket:
    """Returns a listening socket in the file system. Only its owner may connect to it.

    Changes the umask of the process for a moment, so call it where no other thread makes files.

    Raises:
        OSError: it cannot be made, for instance since the path is too long.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    listener.listen(_WAITING)
    return listener


def at_port(address: str, port: int) -> socket.socket:
    """Returns a listening socket of TCP.

    Args:
        address: name or address to listen at.
        port: 0: one that is free.

    Raises:
        OSError: the port is taken, or the address is not one of this host.
    """
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_WAITING)
    except OSError:
        listener.close()
        raise
    return listener


class StatusServer(ThreadingMixIn, BaseServer):
    """Serves a listening socket in threads of its own, from the moment when it is made until `close`.

    At `MAX_CONNECTIONS` the oldest connection is ended for a new one, so that clients that are slow on purpose cannot
    keep others out. Where all threads are busy, perhaps with connections that are gone, a new request gets code 503
    after `_FREE_S`.

    Args:
        listener: the socket; `close` closes it.
        handler: answers a request that may be answered.
        token: what a request must have as `Authorization: Bearer TOKEN`; None: no token is asked for.
        open_paths: paths that need no token.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        listener: socket.socket,
        handler: Handler,
        token: str | None = None,
        open_paths: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(listener.getsockname(), _Handler)
        listener.setblocking(False)  # a client that is gone before it is accepted must not block `accept`
        self.socket = listener
        self._handler, self._token, self._open_paths = handler, token, open_paths
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._free = threading.BoundedSemaphore(2 * MAX_CONNECTIONS)
        self._may_answer = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._ending, self._ended = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="ft_launcher status", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port at which the server listens."""
        return int(self.socket.getsockname()[1])

    def close(self) -> None:
        """Ends the server. Answers that are under way are cut off. Blocks until the accepting thread has ended."""
        os.write(self._ended, b".")
        self._thread.join()
        with self._lock:
            for connection in self._connections:
                _end(connection)
        self.socket.close()
        for descriptor in (self._ending, self._ended):
            os.close(descriptor)

    def _run(self) -> None:
        """The thread `ft_launcher status`: accepts connections until `close`."""
        while self._ending not in readable([self.fileno(), self._ending], None):
            self.handle_request()

    def fileno(self) -> int:
        """Returns the descriptor that is readable when somebody connects."""
        return self.socket.fileno()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accepts one connection, and ends the oldest where there are too many. Called by the base class."""
        connection, where = self.socket.accept()
        with self._lock:
            self._connections.append(connection)
            while len(self._connections) > MAX_CONNECTIONS:
                _end(self._connections.pop(0))
        return connection, where

    def process_request(self, request: Any, client_address: Any) -> None:
        """Has a connection answered in a new thread, or refuses it where too many threads live. Called by the base
        class."""
        if not self._free.acquire(timeout=_FREE_S):
            self._refuse(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers one connection, in its own thread.

        The connection waits here for its turn, and not in `process_request`: the accepting thread must accept the next
        one meanwhile.
        """
        try:
            if not self._may_answer.acquire(timeout=_FREE_S):
                self._refuse(request)
                return
            try:
                super().process_request_thread(request, client_address)
            finally:
                self._may_answer.release()
        finally:
            self._free.release()

    def _refuse(self, request: Any) -> None:
        """Answers a connection with code 503, without reading its request as HTTP."""
        with contextlib.suppress(OSError):
            request.sendall(_BUSY)
            request.recv(65536, socket.MSG_DONTWAIT)  # closing with unread data would reset the connection
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Ends and closes a connection that was answered or refused."""
        with self._lock:
            if request in self._connections:
                self._connections.remove(request)
        _end(request)
        request.close()

    def close_request(self, request: Any) -> None:
        """Closes a connection for which no thread could be started. Called by the base class."""
        self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Does nothing: the client went away, and an error in the handler has been answered."""

    def answer(self, target: str, headers: Message, connection: socket.socket) -> Answer:
        """Returns the answer to a request for `target`. An exception in the handler becomes code 500 with the
        exception's name.

        Called in the connection's thread. A socket in the file system answers only its own user and root, whatever the
        mode of the file is.
        """
        if connection.family == socket.AF_UNIX and not _is_ours(connection):
            return Answer(b"this job is another user's\n", code=403)
        try:
            return self._answer_allowed(target, headers, connection)
        except Exception as error:
            logger.debug("a request for status failed", exc_info=error)
            return Answer(f"{type(error).__name__}\n".encode(), code=500)

    def _answer_allowed(self, target: str, headers: Message, connection: socket.socket) -> Answer:
        """Checks host and token of a request, and returns the handler's answer, or a refusal (400, 401 or 403).

        Args:
            target: the request's path and query, as the client sent them.

        Raises:
            ValueError: the target is no path, or the `Host` no name of a host.
        """
        split = urlsplit(target)
        hosts = headers.get_all("Host", [])
        if len(hosts) > 1 or (split.netloc and split.netloc not in hosts):
            # A proxy between client and server may have looked at the other of the two names (RFC 9112, 3.2).
            return Answer(b"a request names one host\n", code=400)
        if (
            connection.family != socket.AF_UNIX
            and self._token is None
            and not _names_this_host(headers.get("Host", ""))
        ):
            return Answer(b"without a token only this host is answered, by its name localhost\n", code=403)
        if self._token is not None and split.path not in self._open_paths:
            given = headers.get("Authorization", "").partition("Bearer ")[2].strip()
            if not hmac.compare_digest(given.encode(errors="replace"), self._token.encode()):
                return Answer(b"a token is needed: Authorization: Bearer TOKEN\n", code=401)
        query = {name: values[-1] for name, values in parse_qs(split.query, max_num_fields=16).items()}
        return self._handler(split.path, query)


class _Handler(BaseHTTPRequestHandler):
    """Reads the request of one connection, and writes the answer. Each connection carries one request."""

    server: StatusServer
    server_version, sys_version = "ft_launcher", ""

    def setup(self) -> None:
        """Sets the limit of silence, so that a client that sends nothing does not keep the thread."""
        self.request.settimeout(_QUIET_S)
        super().setup()

    def do_GET(self) -> None:
        """Answers GET, and HEAD without the body."""
        answer = self.server.answer(self.path, self.headers, self.connection)
        self.send_response(answer.code)
        self.send_header("Content-Type", answer.kind)
        if answer.stream is None:
            self.send_header("Content-Length", str(len(answer.body)))
        if answer.code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        for name, value in _ALWAYS.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)
            for piece in answer.stream or ():
                self.wfile.write(piece)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Writes nothing: requests for the status have no place in the log of a training."""


def _end(connection: socket.socket) -> None:
    """Ends a connection in both directions. A thread that reads or writes it then gets an error or the end."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user, or as root."""
    return channel.peer(connection).uid in (os.geteuid(), 0)


def _names_this_host(host: str) -> bool:
    """Whether a request names a loopback address as its host.

    A web page can give this host a name of its own (DNS rebinding), have the browser ask it, and read the answer. The
    request then has that name.
    """
    return urlsplit(f"//{host}").hostname in ("localhost", "127.0.0.1", "::1")
