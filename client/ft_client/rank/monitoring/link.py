"""The one connection of this process to its monitor. It never blocks, counts lost messages and reconnects by itself.

The client sends through it, the watchdog receives. The training's state is given by a `StateSource`: after a loss or a
reconnection the whole state is sent again, so no message needs to be kept.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

from rank_monitor.contract.errors import FtError
from rank_monitor.contract.processes.descriptor import moved_up
from rank_monitor.contract.settings import declaration
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire import channel, codec
from rank_monitor.contract.wire.messages import Hello, InterruptAsked, Message, Refused, RestartReport, Welcome

# A script may have set SIGPIPE to its default action, which ends the process.
_QUIETLY = socket.MSG_NOSIGNAL
# A training that sends heartbeats all the time must not pay for a new attempt each time.
_RETRY_NS = 100_000_000
# Between attempts to reconnect: a monitor that is being replaced soon listens again; one that is gone must cost little.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0
# Between attempts while the queue is full: a monitor that runs takes many messages in this time.
_POST_AGAIN_S = 0.01


class StateSource(Protocol):
    """What gives the training's state to the link: the client. Its methods are called from any thread."""

    iteration: int

    def state(self) -> list[tuple[Message, int]]:
        """The whole state for a monitor, hello first, each message with its moment."""

    def disconnect(self) -> None:
        """Called when another source takes its place, and in a forked child."""


class WrapperLink(Protocol):
    """The in-process wrapper's end of the link. Its methods are called from any thread."""

    period_s: float
    """The longest time between two stamps of the main thread."""

    def tick(self) -> None:
        """Called with every stamp."""

    @property
    def restart(self) -> RestartReport | None:
        """The last report of the wrapper, for the hello; None: there was none."""

    def state(self) -> list[tuple[Message, int]]:
        """The whole state of the wrapper for a monitor, each message with its moment."""

    def on_interrupt_asked(self, message: InterruptAsked, sent_ns: int) -> None:
        """Called when the monitor asks for a restart in process."""


def _not_connected(data: bytes, flags: int) -> NoReturn:
    raise ConnectionError("no connection to the monitor")


class Link:
    """The connection, made at the first `reconnect`.

    Args:
        path: the monitor's socket.
        own: whether the launcher started this very process for the rank. For any other process, such as a child that
            connects by itself, a refusal is final.
    """

    def __init__(self, path: Path, own: bool) -> None:
        self.sequence = itertools.count(1)
        self.losses = 0
        self.dirty = False
        """A message was lost: the next one must carry the whole set of sections."""
        self.stale = False
        """Something else was lost: the whole state must go out again."""
        self.settings: MonitorSettings | None = None
        self.refused = ""
        self.closed = False
        self.source: StateSource | None = None
        self.wrapper_link: WrapperLink | None = None
        self.stamp_ns: int | None = None
        """When the main thread last executed bytecode, as far as the watchdog knows."""
        self._path, self._own = path, own
        self._socket: socket.socket | None = None
        self._transmit: Callable[[bytes, int], int] = _not_connected
        self._connecting = _thread.allocate_lock()
        self._not_before_ns = 0
        self._pause_s = _FIRST_PAUSE_S
        self._answered = threading.Event()

    # Called in the training's threads.

    def send(self, data: bytes) -> bool:
        """Sends one message now or not at all. Returns whether it was sent. Does not block."""
        try:
            self._transmit(data, _QUIETLY)
        except OSError as error:
            return self._send_again(data, error)
        return True

    def post(self, message: Message, sent_ns: int, timeout_s: float = 0.0) -> bool:
        """Sends an infrequent message, and tries again for `timeout_s` seconds. Returns whether it was sent."""
        data = codec.encode(message, next(self.sequence), sent_ns)
        give_up_at = time.monotonic() + timeout_s
        while not self.send(data):
            if time.monotonic() >= give_up_at or self.closed:
                self.stale = True
                return False
            time.sleep(_POST_AGAIN_S)
        return True

    def set_source(self, source: StateSource | None) -> None:
        """Sets the source that gives the state; None: this process is connected and not watched."""
        previous, self.source = self.source, source
        if previous is not None and previous is not source:
            previous.disconnect()

    def ask(self, message: Message, sent_ns: int, timeout_s: float) -> MonitorSettings | None:
        """Sends a message and waits up to `timeout_s` seconds for the `Welcome`. Returns its settings, or None."""
        if self.closed:
            return None
        self._answered.clear()
        self.post(message, sent_ns)
        if self._answered.wait(timeout_s):
            return self.settings
        return None

    def reconnect(self) -> bool:
        """Replaces a lost connection, unless an attempt was just made or is under way. Returns whether it succeeded."""
        now_ns = time.monotonic_ns()
        if self.closed or now_ns < self._not_before_ns or not self._connecting.acquire(blocking=False):
            return False
        try:
            self._not_before_ns = now_ns + _RETRY_NS
            self._disconnect()
            return not self.closed and self._connect()
        finally:
            self._connecting.release()

    def close_in_child(self) -> None:
        """Closes the parent's connection in a forked child. No other is made."""
        self.closed = True
        self._disconnect()
        self.wrapper_link = None
        self.set_source(None)

    # Called in the watchdog's thread.

    def poll(self, timeout_s: float) -> None:
        """Receives from the monitor for up to `timeout_s` seconds; reconnects when the connection is lost. Blocks."""
        connection = self._socket
        if connection is None or connection.fileno() < 0:
            time.sleep(min(timeout_s, self._pause_s))
            if self.reconnect():
                self._pause_s = _FIRST_PAUSE_S
            else:
                self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
            return
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        lost = poll.poll(timeout_s * 1000) and not self._drain(connection) and self._socket is connection
        if lost and not self.reconnect():
            time.sleep(min(timeout_s, self._pause_s))

    def resend_state(self) -> None:
        """Sends the whole state again over the present connection."""
        self.dirty = self.stale = False
        for data in self._state():
            if not self.send(data):
                self.stale = True
                return

    # Within.

    def _state(self) -> list[bytes]:
        source, wrapper_link = self.source, self.wrapper_link
        if source:
            state = source.state()
        else:
            state = [(Hello(os.getpid()), time.monotonic_ns())]
        if wrapper_link is not None:
            (hello, sent_ns), *others = state
            assert isinstance(hello, Hello)
            hello = dataclasses.replace(hello, restart=wrapper_link.restart)
            state = [(hello, sent_ns), *wrapper_link.state(), *others]
        return [codec.encode(message, next(self.sequence), sent_ns) for message, sent_ns in state]

    def _send_again(self, data: bytes, error: OSError) -> bool:
        if not isinstance(error, BlockingIOError) and self.reconnect():
            try:
                self._transmit(data, _QUIETLY)
                return True
            except OSError:
                pass
        self.losses += 1
        self.dirty = True
        return False

    def _connect(self) -> bool:
        """Connects and sends the whole state. Only then others can send: the first message must be the hello."""
        self.dirty = self.stale = False
        try:
            high = moved_up(channel.connect(self._path).detach())
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=high)
        except OSError:
            return False
        connection.setblocking(False)
        self._socket = connection
        try:
            for data in self._state():
                connection.send(data, _QUIETLY)
        except OSError:
            self._disconnect()
            return False
        self._transmit = connection.send
        if self.dirty:
            self.resend_state()
        return True

    def _disconnect(self) -> None:
        """Closes the connection. If it was refused, that is final for any process but the rank itself."""
        self._transmit = _not_connected
        connection, self._socket = self._socket, None
        if connection is None:
            return
        if not self.closed:
            self._drain(connection)
        with contextlib.suppress(OSError):  # the script may have closed every descriptor
            connection.close()
        if self.refused and not self._own:
            self.closed = True
            self._answered.set()

    def _drain(self, connection: socket.socket) -> bool:
        """Handles the messages that wait. Returns whether the connection is still open."""
        try:
            taken = channel.receive(connection)
            while taken is not None:
                if not taken[0]:
                    return False
                self._on_message(taken[0])
                taken = channel.receive(connection)
        except OSError:
            return False
        return True

    def _on_message(self, data: bytes) -> None:
        try:
            received = codec.decode(data)
            message = received.message
            if isinstance(message, Welcome):
                self.settings = declaration.from_json(MonitorSettings, message.settings, "the monitor")
                self.refused = ""
                self._answered.set()
            elif isinstance(message, Refused) and self.settings is None:
                self.refused = message.reason
            elif isinstance(message, InterruptAsked):
                wrapper_link = self.wrapper_link
                if wrapper_link is not None:
                    wrapper_link.on_interrupt_asked(message, received.sent_ns)
        except FtError:
            self.losses += 1
