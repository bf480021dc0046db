"""Answers GET requests at one listening socket, of TCP or in the file system, by the standard library's HTTP server.

Its threads are few and wait for nobody: a job is never slower because somebody asks. Until the first connection there
is one sleeping thread.
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
"""At once, each with a thread, and threads that answer; a new connection ends the oldest. Probes, Prometheus and a few
people need fewer."""
_WAITING = 512
"""Connections that the kernel holds until they are taken. Where it holds none more, a client tries again after a
second."""
_QUIET_S = 10.0
"""A connection on which nothing arrives for so long is closed."""
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'"
_ALWAYS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": f"{_POLICY}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_FREE_S = 2.0
"""How long a connection waits until another one's answer is over (seconds). That of an ended connection is within it:
`/events` writes every second, and finds out."""
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True)
class Answer:
    """What is sent back.

    Attributes:
        stream: more pieces of the body, after `body`, until it ends or the client does.
    """

    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    code: int = 200
    stream: Iterator[bytes] | None = None


Handler = Callable[[str, Mapping[str, str]], Answer]
"""Path and query -> answer. Called in a thread of the server."""


def as_file(path: str) -> socket.socket:
    """Returns a listening socket in the file system, which only its owner may use.

    Raises:
        OSError: it cannot be made.
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
    """Returns a listening socket of TCP; port 0 is one that is free.

    Raises:
        OSError: the port is taken, or the address is not of this host.
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
    """Serves in a thread from the start on, and answers each connection in one of its own.

    At `MAX_CONNECTIONS` the oldest is ended for a new one, so that clients that are slow on purpose cannot keep others
    out. So many threads answer: where all are busy, with connections that may be gone, a new one gets code 503 after
    `_FREE_S`. As many may wait for that.

    Args:
        listener: closed by `close`.
        handler: answers a request whose token is right.
        token: that a request must have as `Authorization: Bearer TOKEN`; None: none is asked for.
        open_paths: that need no token.
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
        listener.setblocking(False)  # who has gone again before it is accepted holds nobody up
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
        """The port at which it listens."""
        return int(self.socket.getsockname()[1])

    def close(self) -> None:
        """Ends the server. Answers that are under way are cut off."""
        os.write(self._ended, b".")
        self._thread.join()
        with self._lock:
            for connection in self._connections:
                _end(connection)
        self.socket.close()
        for descriptor in (self._ending, self._ended):
            os.close(descriptor)

    def _run(self) -> None:
        while self._ending not in readable([self.fileno(), self._ending], None):
            self.handle_request()

    def fileno(self) -> int:
        """The descriptor that is readable when somebody connects."""
        return self.socket.fileno()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Takes one connection."""
        connection, where = self.socket.accept()
        with self._lock:
            self._connections.append(connection)
            while len(self._connections) > MAX_CONNECTIONS:
                _end(self._connections.pop(0))
        return connection, where

    def process_request(self, request: Any, client_address: Any) -> None:
        """Has a connection answered in a thread, if there is one."""
        if not self._free.acquire(timeout=_FREE_S):
            self._refuse(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a connection. Waits here for its turn, so that the next one is taken meanwhile."""
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
        with contextlib.suppress(OSError):
            request.sendall(_BUSY)
            request.recv(65536, socket.MSG_DONTWAIT)  # what is left unread would take the answer away
        self.shutdown_request(request)

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

    def answer(self, target: str, headers: Message, connection: socket.socket) -> Answer:
        """Returns the answer to a request for `target`; an error in it is an answer, too."""
        if connection.family == socket.AF_UNIX and not _is_ours(connection):
            return Answer(b"this job is another user's\n", code=403)
        try:
            return self._answer_allowed(target, headers, connection)
        except Exception as error:
            logger.debug("a request for status failed", exc_info=error)
            return Answer(f"{type(error).__name__}\n".encode(), code=500)

    def _answer_allowed(self, target: str, headers: Message, connection: socket.socket) -> Answer:
        """As `answer`; what a client sends may be anything.

        Raises:
            ValueError: it is not a path, or not the name of a host.
        """
        split = urlsplit(target)
        hosts = headers.get_all("Host", [])
        if len(hosts) > 1 or (split.netloc and split.netloc not in hosts):
            # What stands between a client and this server may have looked at the other one (RFC 9112, 3.2).
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
    server: StatusServer
    server_version, sys_version = "ft_launcher", ""

    def setup(self) -> None:
        self.request.settimeout(_QUIET_S)
        super().setup()

    def do_GET(self) -> None:
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
        """Writes nothing: what is asked for has no place in the log of a training."""


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end is of this user, or of root."""
    return channel.peer(connection).uid in (os.geteuid(), 0)


def _names_this_host(host: str) -> bool:
    """Whether a request was made to a loopback address. A web page can make a browser ask this host under a name of its
    own, and read the answer; then that name is in the request."""
    return urlsplit(f"//{host}").hostname in ("localhost", "127.0.0.1", "::1")
