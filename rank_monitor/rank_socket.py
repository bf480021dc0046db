"""The monitor's end of the rank's socket: accepts one connection, of the same user, that begins with a hello.

`server.py` uses it. Messages are received here and not interpreted, apart from the hello.

**Who is the rank.** Any process of the same user can connect to the socket. A connection is first one without a hello;
the first valid hello makes a connection the rank's, and every other connection is refused with the reason. A stray
connection never replaces a live one; a dead one is replaced.

    accepted --hello--> the rank's connection --closed--> on_lost, and the next hello is accepted
        |
        +--no hello, another user, or the rank is connected--> `Refused`, closed

**Reading in batches.** To wake a sleeping monitor costs the rank five times what the message itself costs, and the
monitor a wake-up each. A heartbeat carries the moment at which it was sent, so it can be read later, together with
others, as long as that is well before any limit. Where heartbeats arrive steadily, the connection is therefore not
watched for a while (`unread_until_ns`), and the server calls `drain` when that is over, or before it judges.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from functools import partial

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire import channel, codec
from rank_monitor.contract.wire.channel import Peer
from rank_monitor.contract.wire.codec import Received
from rank_monitor.contract.wire.messages import Hello, Message, Refused
from rank_monitor.loop import Loop

_MAX_WITHOUT_HELLO = 8
"""Connections without a hello; above this number the oldest is closed. Each costs the monitor a descriptor, and any
process of the same user can open one."""
_MAX_BATCH = 500
"""Messages that one `drain` reads: a rank that sends faster than its monitor reads must not keep the monitor from
judging."""
_MAX_READ_BEFORE_CLOSE = 16
"""Messages that are read before a refused connection is closed; the peer may go on sending."""
_MIN_DELAY_NS = 4_000_000
"""The shortest time for which a rank is left unread. Heartbeats so close that `_MAX_UNREAD_HEARTBEATS` of them take
less are a burst, and each is read as it arrives."""
_MAX_UNREAD_HEARTBEATS = 16
"""Heartbeats that may wait unread. A connection holds about two hundred; what does not fit is lost."""
_BUFFER = bytearray(codec.MAX_MESSAGE + 1)
"""What messages are received into: one buffer for the process, which has one rank. Pages that no message has touched
stay shared with the template."""


class RankSocket:
    """The listening socket of a rank and the connections to it.

    Args:
        loop: where the descriptors are watched; all callbacks are called from it, or from `drain`.
        listener: owned by the agent, and accepted from within a cycle only: no message comes before its cycle.
        on_heartbeat: called for each heartbeat, with the moment at which it was sent.
        on_message: called with every other message of the rank, as decoded and as bytes. If it raises ProtocolError,
            the rank gets that as `Refused`, and the connection stays.
        on_hello: called with the peer's credentials before the hello is passed to `on_message`. Raises ProtocolError to
            refuse the connection.
        on_lost: called when the rank's connection has closed.
        on_refused: called with the reason when a message or a connection is refused.
        max_delay_ns: returns for how many nanoseconds a message of the rank may stay unread.
    """

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        on_heartbeat: Callable[[int], None],
        on_message: Callable[[Received, bytes], None],
        on_hello: Callable[[Peer], None],
        on_lost: Callable[[], None],
        on_refused: Callable[[str], None],
        max_delay_ns: Callable[[], int],
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._on_heartbeat = on_heartbeat
        self._on_message = on_message
        self._on_hello = on_hello
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._max_delay_ns = max_delay_ns
        self._client: socket.socket | None = None
        """The rank's connection."""
        self._without_hello: dict[socket.socket, Peer] = {}
        """Accepted connections that are not the rank's, in the order of their arrival."""
        self._oldest_hello_ns: int | None = None
        """Hellos sent before this moment belong to an earlier cycle; None: no cycle runs, nothing is accepted."""
        self._sequence = 0
        self._heartbeats = self._read_ns = 0
        """How many heartbeats the present reading has brought, and when the reading before it was."""
        self.unread_until_ns: int | None = None
        """When `drain` is to be called next because the rank is left unread; None while it is not."""

    def begin(self, oldest_hello_ns: int) -> None:
        """Begins a cycle: closes the connections of the last one, and accepts new ones from now on.

        Args:
            oldest_hello_ns: a hello sent before this moment is refused; 0: each is accepted, for a monitor that takes
                over a rank that runs already.
        """
        self.drop()
        if self._oldest_hello_ns is None:
            self._loop.watch(self._listener.fileno(), self._accept)
        self._oldest_hello_ns = oldest_hello_ns

    def end(self) -> None:
        """Accepts no connection until the next cycle. The rank's present connection stays open: the rank may still
        report how it ends."""
        if self._oldest_hello_ns is not None:
            self._loop.unwatch(self._listener.fileno())
        self._oldest_hello_ns = None
        for connection in list(self._without_hello):
            self._close(connection)

    def drop(self) -> None:
        """Closes every connection, without calling `on_lost`: the rank's process has ended, or the monitor ends."""
        for connection in list(self._without_hello):
            self._close(connection)
        if self._client is not None:
            self._close(self._client)

    def reply(self, message: Message) -> bool:
        """Sends a message to the rank; returns whether it was sent. Without a connection, or with a full queue, the
        message is dropped."""
        return self._client is not None and self._send(self._client, message)

    def drain(self) -> None:
        """Receives the messages that wait on the rank's connection, at most `_MAX_BATCH`. Does not block.

        Where the rank is not connected, connections that wait to be accepted are accepted first: a rank that ends at
        once may have sent all its messages before the loop saw its connection.
        """
        if self._client is None and self._oldest_hello_ns is not None:
            self._accept()
            for connection in list(self._without_hello):
                if connection in self._without_hello:  # the hello of an earlier one may have closed this one
                    self._receive_hello(connection)
        self._receive(_MAX_BATCH)

    def _receive(self, most: int = 1) -> None:
        """Receives up to `most` messages that wait on the rank's connection, and decides when the rank is read next.

        The loop calls this when the connection is readable, for one message: to find that nothing more waits would cost
        more than to be called again.
        """
        received = 1
        while self._receive_one() and received < most:
            received += 1
        self._delay_reading()

    def _delay_reading(self) -> None:
        """Stops watching the rank's connection for messages for a while, where heartbeats arrive steadily.

        The end of the connection is still seen: epoll reports EPOLLHUP without being asked for it (epoll_ctl(2)).
        """
        client, before_ns, heartbeats = self._client, self._read_ns, self._heartbeats
        if client is None:
            return
        self._read_ns, self._heartbeats = time.monotonic_ns(), 0
        delay_ns = batch_delay_ns(heartbeats, self._read_ns - before_ns, self._max_delay_ns())
        if (delay_ns > 0) != (self.unread_until_ns is not None):
            self._loop.watch(client.fileno(), self._receive, readable=delay_ns == 0)
        if delay_ns:
            self.unread_until_ns = self._read_ns + delay_ns
        else:
            self.unread_until_ns = None

    def _receive_one(self) -> bool:
        """Receives and handles one message, or the end of the connection. Returns whether there may be more."""
        client = self._client
        if client is None:
            return False
        try:
            length = client.recv_into(_BUFFER)
        except BlockingIOError:
            return False
        except OSError:
            length = 0
        sent_ns = codec.heartbeat_sent_ns(_BUFFER, length)
        if sent_ns is not None:
            self._heartbeats += 1
            self._on_heartbeat(sent_ns)
        elif length or not channel.closed(client):
            self._handle(client, bytes(_BUFFER[:length]))
        else:
            self._close(client)
            self._on_lost()
            return False
        return True

    def _handle(self, connection: socket.socket, data: bytes) -> None:
        """Decodes a message and passes it on. Whatever the rank sends, its watch goes on: a message that raises is
        refused."""
        try:
            self._on_message(codec.decode(data), data)
        except ProtocolError as error:
            self._refuse(connection, str(error))
        except Exception as error:  # values that nobody has thought of: an edge
            self._refuse(connection, f"{type(error).__name__}: {error}")

    def _accept(self) -> None:
        """Accepts all connections that wait; called by the loop when there are any, and by `drain`.

        The rank's connection is read first: if it is closed, it must not count as the live one that others are refused
        for.
        """
        self._receive(_MAX_BATCH)
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setblocking(False)
            peer = channel.peer(connection)
            self._without_hello[connection] = peer
            if peer.uid != os.getuid():
                self._refuse(connection, f"uid {peer.uid} is not the owner of this monitor", close=True)
            elif self._client is not None:
                self._refuse(connection, "the rank is connected already", close=True)
            else:
                self._loop.watch(connection.fileno(), partial(self._receive_hello, connection))
                if len(self._without_hello) > _MAX_WITHOUT_HELLO:
                    self._refuse(next(iter(self._without_hello)), "too many connections without a hello", close=True)

    def _receive_hello(self, connection: socket.socket) -> None:
        """Receives the first message of a connection, which makes it the rank's, or has it refused and closed."""
        try:
            taken = channel.receive(connection)
            if taken is None:
                return
            if not taken[0]:
                self._close(connection)
                return
            self._check_hello(connection, codec.decode(taken[0]))
        except OSError:
            self._close(connection)
        except ProtocolError as error:
            self._refuse(connection, str(error), close=True)
        else:
            del self._without_hello[connection]
            self._client = connection
            self._loop.watch(connection.fileno(), self._receive)
            self._handle(connection, taken[0])
            self._receive(_MAX_BATCH)

    def _check_hello(self, connection: socket.socket, received: Received) -> None:
        """Checks that the first message of a connection makes the connection the rank's.

        Raises:
            ProtocolError: the rank is connected already, the message is no hello, or a hello of an earlier cycle; or
                `on_hello` refuses the process.
        """
        if self._client is not None:
            raise ProtocolError("the rank is connected already")
        if not isinstance(received.message, Hello):
            raise ProtocolError("the first message must be a hello")
        if received.sent_ns < (self._oldest_hello_ns or 0):
            raise ProtocolError("this hello is of an earlier cycle")
        self._on_hello(self._without_hello[connection])

    def _refuse(self, connection: socket.socket, reason: str, close: bool = False) -> None:
        """Reports a refusal here and to the peer. With `close`, the connection is closed too.

        What waits on the connection is read before it is closed: the kernel would otherwise answer the peer with a
        reset, and the peer would lose the reason.
        """
        self._on_refused(reason)
        self._send(connection, Refused(reason[:1000]))
        if close:
            with contextlib.suppress(OSError):
                for _ in range(_MAX_READ_BEFORE_CLOSE):
                    if channel.receive(connection) is None:
                        break
            self._close(connection)

    def _send(self, connection: socket.socket, message: Message) -> bool:
        """Sends a message if the queue has room; returns whether it had. Does not block. Reading shows whether the peer
        is gone."""
        self._sequence += 1
        try:
            return channel.send(connection, codec.encode(message, self._sequence, time.monotonic_ns()))
        except OSError:
            return False

    def _close(self, connection: socket.socket) -> None:
        self._loop.unwatch(connection.fileno())
        self._without_hello.pop(connection, None)
        if connection is self._client:
            self._client = self.unread_until_ns = None
        connection.close()


def batch_delay_ns(heartbeats: int, passed_ns: int, max_delay_ns: int) -> int:
    """Returns for how many nanoseconds the rank may be left unread; 0: each message is to be read as it arrives. Pure.

    The rate of the last reading decides: as long as `_MAX_UNREAD_HEARTBEATS` take at that rate, but not for so short
    that the next reading would bring one heartbeat alone.

    Args:
        heartbeats: the number of heartbeats that were just read.
        passed_ns: nanoseconds since the previous reading.
        max_delay_ns: the upper limit of the result.
    """
    if heartbeats == 0:
        return 0
    interval_ns = passed_ns // heartbeats
    delay_ns = min(_MAX_UNREAD_HEARTBEATS * interval_ns, max_delay_ns)
    if delay_ns >= max(_MIN_DELAY_NS, interval_ns * 3 // 2):
        return delay_ns
    return 0
