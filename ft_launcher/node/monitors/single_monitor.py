"""The monitor of one rank that no launcher started: `NodeMonitors` with one rank, in a runtime of its own.

Two callers have one, each in its main thread: `agent/standalone.py` watches its rank by it, and the server of the
NVIDIA alias (`nvrx_alias/rank_monitor_server.py`) each rank that connects. They call `begin`, then `wait` and `handle`
in turn, and `receive_last_messages` when the rank has ended. Knows no store, and ends no rank: the monitor does.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace

from ft_launcher.node.monitors.monitors import NodeMonitors
from ft_launcher.node.monitors.rank_report import RankReport, Replaced
from ft_launcher.node.ranks.runtime import Runtime
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.restart_phase import RestartPhase
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.messages import ControlRequest, InterruptedAgain, Message, RestartReport

_LAST_TRIES = 3
"""How often a monitor is asked for its last messages, a fifth of a second each: one that does not answer must not hold
up the report that its rank has ended."""


class SingleMonitor:
    """The monitor of one rank, started when this object is made. The rank may have connected to `listener` before.

    Args:
        runtime: closed by `close`.
        listener: where the rank connects.
        number: by which logs and `ps` name the monitor.
        settings: of the monitor.
        say: called with a line for the log.

    Attributes:
        phase: the last one that the rank's wrapper reported.
    """

    def __init__(
        self,
        runtime: Runtime,
        listener: socket.socket,
        number: int,
        settings: MonitorSettings,
        say: Callable[[str], None],
    ) -> None:
        self.phase = RestartPhase.NONE
        self._runtime, self._say = runtime, say
        # A rank serves torch's flight recorder only where variables of the launcher tell it to.
        settings = replace(settings, flight_recorder="off")
        self._monitors = NodeMonitors(runtime, settings, 1, listeners=[listener], first_number=number)

    def begin(self, rank: int, pid: int, started_ns: int, reconnect: bool = False) -> None:
        """Begins to watch a process as the rank. What was known of an earlier process is discarded.

        Args:
            rank: its number, for logs.
            pid: of the process.
            started_ns: when it was started (monotonic nanoseconds).
            reconnect: it had another monitor before.
        """
        self.phase = RestartPhase.NONE
        if self.report.start is not None:
            self._monitors.end_cycle()
        self._monitors.begin_rank(0, 0, rank, pid, started_ns, reconnect)

    @property
    def report(self) -> RankReport:
        """What the monitor reported about the rank."""
        return self._monitors.report(0)

    @property
    def condemned(self) -> str:
        """Why the monitor condemned the rank, in a line; empty: it did not. A warning of a stall does not count."""
        verdict = self.report.verdict
        if verdict is None or not verdict.condemned:
            return ""
        return verdict.line

    def wait(self, others: set[int]) -> set[int]:
        """Returns which of the descriptors `others` are readable. Blocks until one is, or `handle` should be called."""
        due, left_s = self._monitors.next_check(), None
        if due is not None:
            left_s = max(0.0, due - time.monotonic())
        return readable(others | self._monitors.descriptors(), left_s) & others

    def handle(self) -> None:
        """Handles the messages of the monitor, and replaces one that is lost. Does not block."""
        for _, event in self._monitors.handle():
            self._note(event)

    def receive_last_messages(self) -> None:
        """Handles the last messages about a rank that ended. Blocks for up to 0.6 s.

        The answer to a snapshot comes after all that the rank sent, so nothing is missing once there is one.
        """
        before = self.report.snapshot
        for _ in range(_LAST_TRIES):
            self._monitors.snapshots()
            if self.report.snapshot is not before:
                break
        self.handle()

    def close(self) -> None:
        """Ends monitor and template, and removes the folder."""
        self._monitors.close()
        self._runtime.close()

    def _note(self, event: Message | Replaced) -> None:
        """Keeps the wrapper's phase, and logs what a launcher would have recorded or acted on."""
        match event:
            case RestartReport():
                self.phase = event.phase
            case Replaced(reason):
                self._say(f"the monitor of this rank is gone ({reason}): another takes its place")
            case InterruptedAgain():
                self._say(f"interrupted again after {event.waited_s:.1f} s: {event.why}; it is at\n{event.stack}")
            case ControlRequest():
                self._say(f"the request {event.action} is not acted on: no launcher started this rank")
