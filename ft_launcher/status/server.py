"""Answers GET requests at one listening socket, of TCP or in the file system, by the standard library's HTTP server.

Its threads are few and wait for nobody: a job is never slower because somebody asks. Until the first connection there
is one sleeping thread, and the HTTP server is not even imported.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from rank_monitor.contract.processes.wait import readable

if TYPE_CHECKING:
    from email.message import Message

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 32
"""At once, each with a thread, and threads that answer; a new connection ends the oldest. Probes, Prometheus and a few
people need fewer."""
_WAITING = 512
"""Connections that the kernel holds until they are taken. Where it holds none more, a client tries again after a
second."""
_QUIET_S = 10.0
"""A connection on which nothing arrives for so long is closed."""
_UCRED = struct.Struct("3i")


@dataclass(frozen=True)
class Answer:
    """What is sent back.

    Attributes:
        stream: more pieces of the body, after `body`, until it ends or the client does.
        headers: beside those of every answer.
    """

    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    code: int = 200
    stream: Iterator[bytes] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


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


class StatusServer:
    """Serves in a thread from the start on.

    Args:
        listener: closed by `close`.
        handler: answers a request whose token is right.
        token: that a request must have as `Authorization: Bearer TOKEN`; None: none is asked for.
        open_paths: that need no token.
    """

    def __init__(
        self,
        listener: socket.socket,
        handler: Handler,
        token: str | None = None,
        open_paths: frozenset[str] = frozenset(),
    ) -> None:
        self._listener, self._handler, self._token, self._open_paths = listener, handler, token, open_paths
        self._ending, self._ended = os.pipe2(os.O_CLOEXEC)
        self._server: Any = None
        self._thread = threading.Thread(target=self._run, name="ft_launcher status", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port at which it listens."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Ends the server. Answers that are under way are cut off."""
        os.write(self._ended, b".")
        self._thread.join()
        if self._server is not None:
            self._server.end_connections()
        self._listener.close()
        for descriptor in (self._ending, self._ended):
            os.close(descriptor)

    def _run(self) -> None:
        while self._ending not in readable([self._listener.fileno(), self._ending], None):
            if self._server is None:
                from ft_launcher.status.http_server import HttpServer

                self._server = HttpServer(self._listener, self._answer, MOST_CONNECTIONS, _QUIET_S)
            self._server.handle_request()

    def _answer(self, target: str, headers: Message, connection: socket.socket) -> Answer:
        """Returns the answer to a request for `target`; an error in it is an answer, too."""
        if connection.family == socket.AF_UNIX and not _is_ours(connection):
            return Answer(b"this job is another user's\n", code=403)
        try:
            return self._answer_allowed(target, headers, connection)
        except Exception as error:
            logger.debug("a request for status failed", exc_info=error)
            return Answer(f"{type(error).__name__}\n".encode(), code=500)

    def _answer_allowed(self, target: str, headers: Message, connection: socket.socket) -> Answer:
        """As `_answer`; what a client sends may be anything.

        Raises:
            ValueError: it is not a path, or not the name of a host.
        """
        split = urlsplit(target)
        if (
            connection.family != socket.AF_UNIX
            and self._token is None
            and not _names_this_host(headers.get("Host", ""))
        ):
            return Answer(b"without a token only this host is answered, by its name localhost\n", code=403)
        if self._token is not None and split.path not in self._open_paths:
            given = headers.get("Authorization", "").partition("Bearer ")[2].strip()
            if not hmac.compare_digest(given.encode(errors="replace"), self._token.encode()):
                say = {"WWW-Authenticate": "Bearer"}
                return Answer(b"a token is needed: Authorization: Bearer TOKEN\n", code=401, headers=say)
        query = {name: values[-1] for name, values in parse_qs(split.query, max_num_fields=16).items()}
        return self._handler(split.path, query)


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end is of this user, or of root."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return _UCRED.unpack(found)[1] in (os.geteuid(), 0)


def _names_this_host(host: str) -> bool:
    """Whether a request was made to a loopback address. A web page can make a browser ask this host under a name of its
    own, and read the answer; then that name is in the request."""
    return urlsplit(f"//{host}").hostname in ("localhost", "127.0.0.1", "::1")
