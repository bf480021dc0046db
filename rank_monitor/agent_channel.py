"""The monitor's end of the channel to the node agent, or to the standalone agent of a rank without a launcher.

`server.py` uses it. Messages are sent and received here, and not interpreted. Nothing here blocks while the agent
does not read: the agent may be stopped, or busy with another rank, and the watch must go on. What the agent does not
read is queued up to a bound; beyond the bound the oldest message is dropped.

What a rank sends is passed on within a budget of bytes for each kind of message, so that no rank can keep its launcher
from its work.
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

_MAX_UNSENT = 256
"""Messages that are queued while the agent does not read. A bound on memory: 256 messages of 60,000 bytes are 15 MB."""
_BURST_BYTES = 512 * 1024
"""Bytes of one kind of message that a rank may send at once: eight of the largest messages there can be."""
_BYTES_PER_S = 16 * 1024
"""Bytes of one kind of message that a rank may send steadily: twice what a report on 64 sections every second comes to.
A rank that sent 80 MB in 2.5 s kept its launcher from everything else."""


@dataclass
class ByteBudget:
    """How many bytes of one kind of message may still be passed on: a token bucket. The caller gives the time.

    Attributes:
        left: bytes that may be passed on at once, as of `at_s`.
        at_s: when `left` was computed (monotonic seconds).
    """

    left: float = _BURST_BYTES
    at_s: float = 0.0

    def charge(self, size: int, now_s: float) -> bool:
        """Charges a message of `size` bytes if the budget has as many at `now_s`. Returns whether it had."""
        self.left = min(float(_BURST_BYTES), self.left + (now_s - self.at_s) * _BYTES_PER_S)
        self.at_s = now_s
        if size > self.left:
            return False
        self.left -= size
        return True


class AgentChannel:
    """Sends to the agent and receives from it. Messages that wait are queued up to a bound; then the oldest is lost.

    Args:
        loop: where the descriptor is watched; it calls the three callbacks.
        connection: this end, not blocking.
        on_message: called with each message of the agent; raises ProtocolError if the message is invalid.
        on_close: called when the other end has closed.
        on_refused: called with the reason when a message of the agent, or one of the rank to the agent, is refused.
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
        """Sends a message now, or queues it until the agent reads.

        A verdict or snapshot that is too large for one message goes out without names and frames: what was decided
        matters more than what describes it.
        """
        self._sequence += 1
        try:
            data = codec.encode(message, self._sequence, time.monotonic_ns())
        except ValueError:
            data = codec.encode(_shortened(message), self._sequence, time.monotonic_ns())
        self._send(data)

    def forward(self, message: Message, data: bytes) -> None:
        """Passes on the bytes of a rank's message, unless the rank exceeds the budget of this kind of message.

        Reports of a restart have a budget for each phase. A rank that switches its hang protection off and on in each
        step sends two reports a step, and must not use up the budget of the phases that follow a fault.
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
        """Sends what is queued as long as the agent reads, and has the loop call again when there is room.

        An agent that is gone is not noticed here: reading shows that.
        """
        try:
            while self._unsent and channel.send(self._connection, self._unsent[0]):
                self._unsent.popleft()
        except OSError:
            pass
        self._loop.watch(self._connection.fileno(), self._on_ready, writable=bool(self._unsent))

    def _on_ready(self) -> None:
        """Called by the loop when the agent reads again, has sent a message, or has closed its end.

        Receives one message. A message that cannot be used is reported by `on_refused`, and never ends the monitor: one
        that ended would watch nothing.
        """
        if self._unsent:
            self._flush()
        try:
            received = channel.receive(self._connection)
        except OSError:
            received = b"", []
        if received is None:
            return
        # No bytes mean the end, or an empty message, which is an invalid one.
        if not received[0] and channel.closed(self._connection):
            self._on_close()
            return
        try:
            self._on_message(codec.decode(received[0]))
        except ProtocolError as error:
            self._on_refused(f"from the agent: {error}")
        except Exception as error:  # values that nobody has thought of: an edge
            self._on_refused(f"from the agent: {type(error).__name__}: {error}")


def _shortened(message: Message) -> Message:
    """Returns a verdict or a snapshot without the parts whose size a rank decides."""
    if isinstance(message, Verdict):
        return dataclasses.replace(message, sections={}, frames=[], process={})
    assert isinstance(message, Snapshot)
    return dataclasses.replace(message, sections={}, groups={})
