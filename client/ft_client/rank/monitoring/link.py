"""The one connection of this process to its monitor. It never blocks the training, counts lost messages and reconnects
by itself.

The client, the in-process wrapper and all other parts of the rank that report send through the link; the watchdog
receives. No message is queued: a message that cannot be sent at once is lost, and the loss is noted (`dirty`, `stale`).
After a loss or a reconnection the whole state is sent again, as a `StateSource` gives it.

**A connection** is made by `reconnect`, which `process.py` calls first and every failed send again: connect, send the
hello and the whole state, and only then let other threads send.

Threads: `send`, `post`, `ask` and `reconnect` are called in the training's threads, `poll` and `resend_state` in the
watchdog's. No lock is held while a message is sent: one send of a whole message is atomic. `_connecting` lets one
thread at a time make a connection; the others go on without.
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
from rank_monitor.contract.wire.messages import (
    Hello,
    InterruptAsked,
    Message,
    Refused,
    RestartReport,
    StacksAsked,
    Welcome,
)

_QUIETLY = socket.MSG_NOSIGNAL
"""A script may have set SIGPIPE to its default action, which would end the process at a send."""
_RETRY_NS = 100_000_000
"""The shortest time from one attempt to reconnect to the next: a training that sends heartbeats all the time must not
pay for an attempt with each."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0
"""The watchdog's pauses between attempts to reconnect, doubled each time. A monitor that is being replaced soon listens
again; one that is gone must cost little."""
_POST_AGAIN_S = 0.01
"""From one attempt to send to the next while the queue is full: a monitor that runs reads many messages in this
time."""


class StateSource(Protocol):
    """What gives the training's state to the link: `RankMonitorClient`. Its methods are called from any thread."""

    iteration: int

    def state(self) -> list[tuple[Message, int]]:
        """Returns the whole state for a monitor: messages, hello first, each with the moment since which it holds."""

    def disconnect(self) -> None:
        """Called when another source takes the place of this one, and in a forked child: it is to send no more."""


class WrapperLink(Protocol):
    """The in-process wrapper's end of the link: `inprocess/restart/monitor_link.py`. Its methods are called from any
    thread."""

    period_s: float
    """The longest time between two stamps of the main thread that the wrapper's timeouts allow."""

    def tick(self) -> None:
        """Called by the watchdog with every stamp."""

    @property
    def restart(self) -> RestartReport | None:
        """The last report of the wrapper, for the hello; None: there was none."""

    def state(self) -> list[tuple[Message, int]]:
        """Returns the whole state of the wrapper for a monitor: messages, each with its moment."""

    def on_interrupt_asked(self, message: InterruptAsked, sent_ns: int) -> None:
        """Called when the monitor asks for a restart in process, in the thread that receives, which is a hidden one.
        Must not block, nor log (`hidden_thread.py`)."""


def _not_connected(data: bytes, flags: int) -> NoReturn:
    """Stands in for the send of a socket while there is no connection."""
    raise ConnectionError("no connection to the monitor")


class Link:
    """The connection, made at the first `reconnect`.

    Args:
        path: the monitor's socket.
        own: whether the launcher started this very process for the rank. For any other process, such as a child that
            connects by itself, a refusal by the monitor is final.
    """

    def __init__(self, path: Path, own: bool) -> None:
        self.sequence = itertools.count(1)
        self.losses = 0
        self.dirty = False
        """A message was lost: the next one must carry the whole set of sections."""
        self.stale = False
        """Something else was lost: the whole state must be sent again."""
        self.settings: MonitorSettings | None = None
        """The monitor's settings; None: it has not answered yet."""
        self.refused = ""
        """Why the monitor refused this process; empty: it did not."""
        self.closed = False
        """Nothing is sent any more, and no connection is made."""
        self.source: StateSource | None = None
        self.wrapper_link: WrapperLink | None = None
        self.stacks_asked = False
        """The monitor wants the stacks of this process. The watchdog writes them, once however often it was asked."""
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
        """Sends one message now or not at all. Returns whether it was sent. Does not block.

        The hot path: a heartbeat is one call of this. Where the connection is broken, one attempt is made to replace
            it.
        """
        try:
            self._transmit(data, _QUIETLY)
        except OSError as error:
            return self._send_again(data, error)
        return True

    def post(self, message: Message, sent_ns: int, timeout_s: float = 0.0) -> bool:
        """Sends an infrequent message. Returns whether it was sent.

        Args:
            message: the message.
            sent_ns: the moment that it is to carry: since when it holds.
            timeout_s: for how many seconds to try again. Blocks as long; 0: not at all.
        """
        data = codec.encode(message, next(self.sequence), sent_ns)
        give_up_at = time.monotonic() + timeout_s
        while not self.send(data):
            if time.monotonic() >= give_up_at or self.closed:
                self.stale = True
                return False
            time.sleep(_POST_AGAIN_S)
        return True

    def set_source(self, source: StateSource | None) -> None:
        """Sets the source that gives the state; None: this process is connected, and not watched by the monitor."""
        previous, self.source = self.source, source
        if previous is not None and previous is not source:
            previous.disconnect()

    def ask(self, message: Message, sent_ns: int, timeout_s: float) -> MonitorSettings | None:
        """Sends a message that is answered by `Welcome`. Returns the settings in the answer; None: there was none in
        time.

        Blocks for up to `timeout_s` seconds. The watchdog's thread receives the answer.
        """
        if self.closed:
            return None
        self._answered.clear()
        self.post(message, sent_ns)
        if self._answered.wait(timeout_s):
            return self.settings
        return None

    def reconnect(self) -> bool:
        """Replaces a lost connection, unless an attempt was just made or is under way in another thread.

        Returns whether there is a new connection. Does not block.
        """
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
        """Closes the parent's connection in a forked child, which makes no other one: the child is not the rank."""
        self.closed = True
        self._disconnect()
        self.wrapper_link = None
        self.set_source(None)

    # Called in the watchdog's thread.

    def poll(self, timeout_s: float, after_each: Callable[[], None] = lambda: None) -> None:
        """Receives from the monitor for up to `timeout_s` seconds, or until something has come. Blocks.

        Where there is no connection, waits a while and tries to make one. `after_each` is called after each message.
        """
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
        lost = poll.poll(timeout_s * 1000) and not self._drain(connection, after_each) and self._socket is connection
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
        """Returns the whole state as encoded messages: the hello, the wrapper's state, and that of the training."""
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
        """Tries once more after a failed send, if that was due to a lost connection. Returns whether it was sent.

        A full queue is no reason to reconnect: the monitor is busy or stopped, and the message is lost.
        """
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
        """Connects and sends the whole state. Returns whether that succeeded.

        Only then `_transmit` is set, by which other threads can send: the first message must be the hello. What was
        lost until then is made good by sending the state once more.
        """
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
        """Closes the connection, after reading what the monitor sent last: it may say why it has refused this process.

        A refusal is final for any process but the rank itself.
        """
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

    def _drain(self, connection: socket.socket, after_each: Callable[[], None] = lambda: None) -> bool:
        """Handles the messages that wait. Returns whether the connection is still open. Does not block."""
        try:
            received = channel.receive(connection)
            while received is not None:
                if not received[0]:
                    return False
                self._on_message(received[0])
                after_each()
                received = channel.receive(connection)
        except OSError:
            return False
        return True

    def _on_message(self, data: bytes) -> None:
        """Handles one message of the monitor. One that makes no sense is counted, and raises nothing."""
        try:
            received = codec.decode(data)
            message = received.message
            if isinstance(message, Welcome):
                self.settings = declaration.from_json(MonitorSettings, message.settings, "the monitor")
                self.refused = ""
                self._answered.set()
            elif isinstance(message, Refused) and self.settings is None:
                self.refused = message.reason
            elif isinstance(message, StacksAsked):
                self.stacks_asked = True
            elif isinstance(message, InterruptAsked):
                wrapper_link = self.wrapper_link
                if wrapper_link is not None:
                    wrapper_link.on_interrupt_asked(message, received.sent_ns)
        except FtError:
            self.losses += 1
