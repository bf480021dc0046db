"""The monitor's end of the channel to the node agent, or to the companion in its place. Nothing here blocks while the
agent does not read.

`server.py` uses it. It sends and receives messages and does not interpret them.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire import channel, codec
from rank_monitor.contract.wire.codec import Received
from rank_monitor.contract.wire.launcher_messages import Snapshot, Verdict
from rank_monitor.contract.wire.messages import Message, RestartReport
from rank_monitor.loop import Loop

# A bound on memory while the agent does not read: at most 256 messages of 60,000 bytes, 15 MB.
_MAX_UNSENT = 256
_BURST_BYTES = 512 * 1024
"""Bytes of one kind of message that a rank may send at once: eight of the largest there can be."""
_BYTES_PER_S = 16 * 1024
"""And steadily: twice what a report on 64 sections every second comes to. A rank that sent 80 MB in 2.5 s kept its
launcher from everything else."""


@dataclass
class ByteBudget:
    """How many bytes of one kind of message may still be passed on: a token bucket. The caller gives the time."""

    left: float = _BURST_BYTES
    at_s: float = 0.0

    def charge(self, size: int, now_s: float) -> bool:
        """Whether a message of `size` bytes is within the budget at `now_s`; if so it is charged."""
        self.left = min(float(_BURST_BYTES), self.left + (now_s - self.at_s) * _BYTES_PER_S)
        self.at_s = now_s
        if size > self.left:
            return False
        self.left -= size
        return True


class AgentChannel:
    """Sends to the agent and receives from it. Messages that wait are queued up to a bound; then the oldest is lost.

    Args:
        loop: where the descriptor is watched.
        connection: this end, not blocking.
        on_message: called with each message of the agent; raises ProtocolError if that is invalid.
        on_close: called when the other end closed.
        on_refused: called with the reason why a message is refused.
    """

    def __init__(
        self,
        loop: Loop,
        connection: socket.socket,
        on_message: Callable[[Received], None],
        on_close: Callable[[], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self._loop, self._connection = loop, connection
        self._on_message = on_message
        self._on_close = on_close
        self._on_refused = on_refused
        self._unsent: deque[bytes] = deque(maxlen=_MAX_UNSENT)
        self._sequence = 0
        self._budgets: dict[object, ByteBudget] = {}
        loop.watch(connection.fileno(), self._on_ready)

    def send(self, message: Message) -> None:
        """Sends a message now, or queues it until the agent reads."""
        self._sequence += 1
        try:
            data = codec.encode(message, self._sequence, time.monotonic_ns())
        except ValueError:  # names or frames too long for one message: what was decided goes out without them
            data = codec.encode(_shortened(message), self._sequence, time.monotonic_ns())
        self._send(data)

    def forward(self, message: Message, data: bytes) -> None:
        """Passes on the bytes of a rank's message, unless the rank exceeds the budget of this kind of message.

        Reports of a restart have a budget for each phase: a rank that switches its hang protection off and on in each
        step must not use up that of the faults.
        """
        budget: object = type(message)
        if isinstance(message, RestartReport):
            budget = message.phase
        if self._budgets.setdefault(budget, ByteBudget()).charge(len(data), time.monotonic()):
            self._send(data)
        else:
            kind = type(message).__name__
            self._on_refused(f"{kind} above {_BYTES_PER_S} bytes a second: not passed on to the launcher")

    def _send(self, data: bytes) -> None:
        self._unsent.append(data)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent and channel.send(self._connection, self._unsent[0]):
                self._unsent.popleft()
        except OSError:
            pass  # it is gone, as reading will show
        self._loop.watch(self._connection.fileno(), self._on_ready, writable=bool(self._unsent))

    def _on_ready(self) -> None:
        if self._unsent:
            self._flush()
        try:
            taken = channel.receive(self._connection)
        except OSError:
            taken = b"", []
        if taken is None:
            return
        if not taken[0] and channel.closed(self._connection):  # an empty message is invalid
            self._on_close()
            return
        try:
            self._on_message(codec.decode(taken[0]))
        except ProtocolError as error:
            self._on_refused(f"from the agent: {error}")
        except Exception as error:  # values that make no sense: a monitor that ended by them would watch nothing
            self._on_refused(f"from the agent: {type(error).__name__}: {error}")


def _shortened(message: Message) -> Message:
    if isinstance(message, Verdict):
        return dataclasses.replace(message, sections={}, frames=[], process={})
    assert isinstance(message, Snapshot)
    return dataclasses.replace(message, sections={}, groups={})
