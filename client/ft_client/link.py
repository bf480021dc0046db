"""The one connection of this process to its monitor: never blocks, counts what it loses, comes back by itself.

Knows bytes and when to try again. What the training's state is, its speaker tells: after a loss or a reconnection the
whole state goes out again, so nothing needs to be kept for a second try.
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

from rank_monitor.contract import channel, codec, settings
from rank_monitor.contract.config import MonitorSettings
from rank_monitor.contract.descriptor import moved_up
from rank_monitor.contract.errors import FtError
from rank_monitor.contract.messages import Hello, InterruptAsked, Message, Refused, Welcome

_QUIETLY = socket.MSG_NOSIGNAL  # a script may have set SIGPIPE to its deadly default
_RETRY_NS = 100_000_000
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0
_POST_AGAIN_S = 0.01


class Speaker(Protocol):
    """Who speaks for the training. Its methods are called from any thread."""

    iteration: int

    def state(self) -> list[tuple[Message, int]]:
        """All that a monitor must know, hello first, each message with its moment."""

    def forget(self) -> None:
        """It no longer speaks for the training: another does, or this is a forked child."""


class Guardian(Protocol):
    """The in-process wrapper's end of the link. Its methods are called from any thread."""

    period_s: float
    """The longest time between two stamps of the main thread."""

    def tick(self) -> None:
        """Called with every stamp."""

    def state(self) -> list[tuple[Message, int]]:
        """All that a monitor must know of the wrapper, each message with its moment."""

    def asked(self, message: InterruptAsked, sent_ns: int) -> None:
        """The monitor asks for a restart in process."""


def _nowhere(data: bytes, flags: int) -> NoReturn:
    raise ConnectionError("no connection to the monitor")


class Link:
    """The connection, made at the first `reconnect`.

    Args:
        path: the monitor's socket.
        own: the launcher started this very process for the rank. Any other process, a child that connects by itself,
            takes a refusal for an answer.
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
        self.speaker: Speaker | None = None
        self.guardian: Guardian | None = None
        self.stamp_ns: int | None = None
        """When the main thread last executed bytecode, as far as the watchdog knows."""
        self._path, self._own = path, own
        self._socket: socket.socket | None = None
        self._transmit: Callable[[bytes, int], int] = _nowhere
        self._connecting = _thread.allocate_lock()
        self._not_before_ns = 0
        self._pause_s = _FIRST_PAUSE_S
        self._answered = threading.Event()

    # Called in the training's threads.

    def send(self, data: bytes) -> bool:
        """Sends one message now or not at all; returns whether it went out."""
        try:
            self._transmit(data, _QUIETLY)
        except OSError as error:
            return self._send_again(data, error)
        return True

    def post(self, message: Message, sent_ns: int, patience_s: float = 0.0) -> bool:
        """Sends a message that is not of the hot path, trying for `patience_s`; returns whether it went out."""
        data = codec.encode(message, next(self.sequence), sent_ns)
        give_up_at = time.monotonic() + patience_s
        while not self.send(data):
            if time.monotonic() >= give_up_at or self.closed:
                self.stale = True
                return False
            time.sleep(_POST_AGAIN_S)
        return True

    def speak_for(self, speaker: Speaker | None) -> None:
        """From now on `speaker` tells the state; None: this process is there, and not watched."""
        former, self.speaker = self.speaker, speaker
        if former is not None and former is not speaker:
            former.forget()

    def ask(self, message: Message, sent_ns: int, patience_s: float) -> MonitorSettings | None:
        """Sends a message that is answered by a welcome; returns the settings it brought, None if it did not come."""
        if self.closed:
            return None
        self._answered.clear()
        self.post(message, sent_ns)
        return self.settings if self._answered.wait(patience_s) else None

    def reconnect(self) -> bool:
        """Makes a new connection in place of a lost one, unless one was tried a moment ago or is being made."""
        now_ns = time.monotonic_ns()
        if self.closed or now_ns < self._not_before_ns or not self._connecting.acquire(blocking=False):
            return False
        try:
            self._not_before_ns = now_ns + _RETRY_NS
            self._disconnect()
            return not self.closed and self._connect()
        finally:
            self._connecting.release()

    def forget(self) -> None:
        """In a forked child: lets go of the parent's connection, for good."""
        self._end()
        self.guardian = None
        self.speak_for(None)

    # Called in the watchdog's thread.

    def attend(self, timeout_s: float) -> None:
        """Listens to the monitor for at most so long; when the connection is lost, makes it anew."""
        connection = self._socket
        if connection is None or connection.fileno() < 0:
            time.sleep(min(timeout_s, self._pause_s))
            self._pause_s = _FIRST_PAUSE_S if self.reconnect() else min(2 * self._pause_s, _LAST_PAUSE_S)
            return
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        lost = poll.poll(timeout_s * 1000) and not self._listen(connection) and self._socket is connection
        if lost and not self.reconnect():
            time.sleep(min(timeout_s, self._pause_s))

    def restate(self) -> None:
        """Sends the whole state again over the connection there is."""
        self.dirty = self.stale = False
        for data in self._state():
            if not self.send(data):
                self.stale = True
                return

    # Within.

    def _state(self) -> list[bytes]:
        speaker, guardian = self.speaker, self.guardian
        state = speaker.state() if speaker else [(Hello(os.getpid()), time.monotonic_ns())]
        if guardian is not None:
            (hello, sent_ns), *rest = state
            assert isinstance(hello, Hello)
            state = [(dataclasses.replace(hello, guarded=True), sent_ns), *guardian.state(), *rest]
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
        """Nothing else is sent before the hello: the connection is not in use until the whole state went out."""
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
            self.restate()
        return True

    def _disconnect(self) -> None:
        """Closes the connection; a refusal that was its last word is final for any process but the rank itself."""
        self._transmit = _nowhere
        connection, self._socket = self._socket, None
        if connection is None:
            return
        if not self.closed:
            self._listen(connection)
        with contextlib.suppress(OSError):  # the script may have closed every descriptor
            connection.close()
        if self.refused and not self._own:
            self.closed = True
            self._answered.set()

    def _end(self) -> None:
        self.closed = True
        self._disconnect()

    def _listen(self, connection: socket.socket) -> bool:
        """Takes what the monitor said; returns whether the connection lives."""
        try:
            while (taken := channel.receive(connection)) is not None:
                if not taken[0]:
                    return False
                self._heard(taken[0])
        except OSError:
            return False
        return True

    def _heard(self, data: bytes) -> None:
        try:
            received = codec.decode(data)
            message = received.message
            if isinstance(message, Welcome):
                self.settings = settings.from_json(MonitorSettings, message.settings, "the monitor")
                self.refused = ""
                self._answered.set()
            elif isinstance(message, Refused) and self.settings is None:
                self.refused = message.reason
            elif isinstance(message, InterruptAsked) and (guardian := self.guardian) is not None:
                guardian.asked(message, received.sent_ns)
        except FtError:
            self.losses += 1
