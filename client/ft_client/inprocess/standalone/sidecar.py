"""The monitor of one standalone rank, with its template and its listening socket, as a launcher has for each rank.

The companion and the alias' `RankMonitorServer` use it and read what the monitor reported. Knows no store and no call.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.processes.spawn import Template
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire import channel, codec
from rank_monitor.contract.wire.launcher_messages import (
    Connected,
    CycleStart,
    Snapshot,
    SnapshotRequest,
    StopJudging,
    Verdict,
)
from rank_monitor.contract.wire.messages import ControlRequest, InterruptedAgain, LimitsSet, Message, RestartReport

# A monitor that does not answer must not hold up the report that its rank has ended.
_LAST_MESSAGES_S = 0.5


class Sidecar:
    """Starts the monitor; a rank may have connected before.

    Args:
        template: forks the monitor.
        folder: the runtime folder; removed by `close`.
        listener: where the rank connects.
        start: describes the rank to its monitor.
        say: called with a line for the log.
        settings: of the monitor; None: the defaults.
    """

    def __init__(
        self,
        template: Template,
        folder: Path,
        listener: socket.socket,
        local_rank: int,
        start: CycleStart,
        say: Callable[[str], None],
        settings: MonitorSettings | None = None,
    ) -> None:
        self.condemned = ""
        """Why the monitor condemned the rank; empty if it did not."""
        self.state = ""
        """The last phase that the rank's wrapper reported."""
        self.client_pid = 0
        """The pid of the process that connected as the rank; 0 if none did."""
        self._folder, self._listener, self._local_rank, self._start = folder, listener, local_rank, start
        self._say, self._settings = say, settings or MonitorSettings()
        self._limits: LimitsSet | None = None
        self._restart: RestartReport | None = None
        self._sequence = 0
        self._template = template
        self._monitor = template.fork_monitor(listener, self._settings, local_rank)
        self._send(start)

    def descriptors(self) -> set[int]:
        """The descriptors to wait for; when one is readable, `handle` should be called."""
        found = {self._monitor.channel.fileno(), self._monitor.pidfd}
        if self._template.alive:
            found.add(self._template.fileno())
        return found

    def handle(self) -> None:
        """Handles the monitor's messages; replaces the monitor if it is gone."""
        self._hear()
        self._template.changes()
        if readable([self._monitor.pidfd], 0.0):
            self._say("the monitor of this rank is gone: another takes its place")
            self._monitor.close(goodbye_s=0)
            self._monitor = self._template.fork_monitor(self._listener, self._settings, self._local_rank)
            self._send(replace(self._start, reconnect=True))
            for message in (self._limits, self._restart):
                if message is not None:
                    self._send(message)

    def begin(self, start: CycleStart) -> None:
        """Begins with another process as the rank. What was known of the former one is discarded."""
        self._start, self._limits, self._restart = start, None, None
        self.condemned, self.state, self.client_pid = "", "", 0
        self._send(StopJudging())
        self._send(start)

    def receive_last_messages(self) -> None:
        """Handles the monitor's last messages about a rank that ended. Blocks for up to 0.5 s."""
        self._send(SnapshotRequest(1))
        deadline = time.monotonic() + _LAST_MESSAGES_S
        channel_fd, ended = self._monitor.channel.fileno(), self._monitor.pidfd
        left_s = _LAST_MESSAGES_S
        while left_s > 0:
            ready = readable([channel_fd, ended], left_s)
            if self._hear() or ended in ready:
                return
            left_s = deadline - time.monotonic()

    def close(self) -> None:
        """Ends monitor and template, and removes the folder."""
        self._monitor.close()
        self._template.close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _hear(self) -> bool:
        """Handles the messages that wait. Returns whether one was a snapshot."""
        snapshot = False
        with contextlib.suppress(OSError):
            taken = channel.receive(self._monitor.channel)
            while taken is not None and taken[0]:
                with contextlib.suppress(ProtocolError):
                    message = codec.decode(taken[0]).message
                    self._note(message)
                    snapshot |= isinstance(message, Snapshot)
                taken = channel.receive(self._monitor.channel)
        return snapshot

    def _note(self, message: Message) -> None:
        match message:
            case Verdict(condemned=True):
                self.condemned = message.line
            case LimitsSet():
                self._limits = message
            case RestartReport():
                self.state, self._restart = message.phase, message
            case Connected():
                self._start = replace(self._start, attached=message.attached)
                self.client_pid = message.pid
            case InterruptedAgain():
                self._say(f"interrupted again after {message.waited_s:.1f} s: {message.why}; it is at\n{message.stack}")
            case ControlRequest():
                self._say(f"the request {message.action} is not acted on: no launcher started this rank")

    def _send(self, message: Message) -> None:
        self._sequence += 1
        with contextlib.suppress(OSError):
            channel.send(self._monitor.channel, codec.encode(message, self._sequence, time.monotonic_ns()))
