"""Starts monitors: by a template process that forks them, or one by one where the template is gone.

The launcher (`ft_launcher/node/ranks/runtime.py`), the standalone agent of a rank, and the alias' `RankMonitorServer`
call it. Standard library only, and usable before torch is imported. Starts no threads.

1. `Template.start` executes `rank_monitor/template.py` in a new interpreter, and returns at once: the launcher imports
   torch while the template imports what monitors need.
2. `Template.fork_monitor` sends a request with descriptors: the rank's listening socket, one end of the channel to the
   new monitor, and the lease. The answer is the monitor's pid with a pidfd.
3. `Template.changes` receives which monitors ended, were stopped or continued: only their parent, the template, learns
   of a stop.
4. `Monitor.close` ends one monitor, `Template.close` the template and the sweeper.

A fork of the template has its imports already, and shares its memory. Where the template has died or is stopped, each
further monitor is executed in an interpreter of its own: slower, and only a pidfd shows its end.

The end of the caller is seen by the channels: a monitor or a template whose channel closes without `Bye` takes the
caller for killed, and kills the processes of the job. So a forked child of the caller that lives on must close what is
held here: while it has a copy of a channel, the other end does not close.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rank_monitor import contract
from rank_monitor.contract import env
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.processes.wait import await_child, readable
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.settings.declaration import to_json
from rank_monitor.contract.wire import channel, codec
from rank_monitor.contract.wire.launcher_messages import NOTHING_LEFT, Bye, Forked, ForkMonitor, MonitorChanged
from rank_monitor.contract.wire.messages import Message

_ANSWER_S = 5.0
"""Seconds for which a template that is stopped holds up the launcher; then the monitor is executed without it."""
_GOODBYE_S = 1.0
"""Seconds in which a monitor or template that was asked to end does so. One that does not is stopped or stuck, and is
killed."""
_MAX_DIGITS = 20
"""Of the sweeper's pid as it sends it: a 64-bit number has no more."""
_START = "import sys; sys.path.append({root!r}); from rank_monitor.template import main; main()"
"""What a new interpreter runs. The root is appended, so that a file of another package can never stand in for a module
of the standard library."""


@dataclass
class Monitor:
    """A monitor that runs, as `Template.fork_monitor` returns it. The caller calls `close` in the end.

    Attributes:
        local_rank: of the rank that it watches.
        pid: of the monitor.
        pidfd: readable when the monitor has ended.
        channel: the caller's end of the channel to the monitor; it does not block.
    """

    local_rank: int
    pid: int
    pidfd: int
    channel: socket.socket
    _process: subprocess.Popen[bytes] | None = None
    """Of a monitor that was executed, which this process must reap; the template reaps those that it forked."""

    def close(self, goodbye_s: float = _GOODBYE_S, last: Callable[[], object] = lambda: None) -> None:
        """Ends the monitor: `Bye`, then SIGKILL if it has not exited after `goodbye_s` seconds. Blocks until then.

        Args:
            goodbye_s: how long the monitor may take; 0: it is known to be stopped or dead.
            last: called when the monitor has ended: what it sent is still in the channel, and can be received here.
        """
        with contextlib.suppress(OSError):
            channel.send(self.channel, codec.encode(Bye(), 0, time.monotonic_ns()))
        if not readable([self.pidfd], goodbye_s):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            readable([self.pidfd], _GOODBYE_S)
        last()
        self.channel.close()
        os.close(self.pidfd)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GOODBYE_S)


class Template:
    """The caller's handle of the template process. Make it with `start`.

    Args:
        process: of the template.
        connection: the caller's end of the channel to the template.
        job: the fields of an order that every process of the job gets: the tag and the runtime folder.
        sweeper: the caller's end of the channel to the sweeper; None: no sweeper was asked for.

    Attributes:
        socket: `connection`.
        goodbye: what `close` sends to the sweeper.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        connection: socket.socket,
        job: dict[str, str],
        sweeper: socket.socket | None = None,
    ) -> None:
        self._process = process
        self._sweeper, self._sweeper_pid = sweeper, 0
        self.socket = connection
        self._job = job
        self.goodbye = NOTHING_LEFT
        self._changes: list[MonitorChanged] = []
        self._gone = False
        self._sequence = 0

    @classmethod
    def start(cls, tag: str, runtime_dir: Path, sweeper: bool = False) -> Template:
        """Executes the template, and returns its handle at once.

        Args:
            tag: marks the job's processes in their environment. The template kills all processes with this tag when the
                caller was killed.
            runtime_dir: removed in the same case.
            sweeper: whether to fork the sweeper, which does the same when all other processes are killed at once.

        Raises:
            OSError: no process can be started.
        """
        ours, theirs = channel.pair()
        job = {"tag": tag, "runtime_dir": str(Path(runtime_dir).resolve())}
        kept, passed_on = [ours], [theirs]
        order = {"launcher": theirs.fileno()}
        to_sweeper = None
        if sweeper:
            to_sweeper, its_end = channel.pair()
            kept.append(to_sweeper)
            passed_on.append(its_end)
            order["sweeper"] = its_end.fileno()
        try:
            return cls(_execute({**job, **order}), ours, job, to_sweeper)
        except OSError:
            for end in kept:
                end.close()
            raise
        finally:
            for end in passed_on:
                end.close()

    @property
    def pid(self) -> int | None:
        """The pid of the template; None: it has ended, or was given up."""
        if self.alive:
            return self._process.pid
        return None

    @property
    def sweeper_pid(self) -> int | None:
        """The sweeper's pid; None until it has reported it. Does not block."""
        if self._sweeper is not None and not self._sweeper_pid:
            with contextlib.suppress(OSError, ValueError):
                self._sweeper_pid = int(self._sweeper.recv(_MAX_DIGITS))
        return self._sweeper_pid or None

    @property
    def alive(self) -> bool:
        """Whether the template can fork monitors and report changes. False also for one that was given up."""
        return not self._gone and self._process.poll() is None

    def fileno(self) -> int:
        """Returns a descriptor that is readable when there are changes, or when the template is gone."""
        return self.socket.fileno()

    def fork_monitor(
        self, listener: socket.socket, settings: MonitorSettings, local_rank: int, lease: int | None = None
    ) -> Monitor:
        """Starts a monitor on a listening socket. Blocks for 5 s at most.

        A template that is gone or does not answer is given up, and the monitor is executed directly. Of such a monitor
        no stop is reported, only its end (`Monitor.pidfd`).

        Args:
            listener: where the rank connects. The monitor gets a copy; the caller keeps the socket for the next one.
            settings: the limits by which the monitor judges.
            local_rank: for logs and the name in `ps`.
            lease: descriptor of a timer. When it is readable, the monitor ends its rank. None: there is no lease.

        Raises:
            OSError: no process can be started.
        """
        ours, theirs = channel.pair()
        try:
            request = ForkMonitor(local_rank, to_json(settings))
            descriptors: tuple[int, ...] = (listener.fileno(), theirs.fileno())
            if lease is not None:
                descriptors = (*descriptors, lease)
            if self.alive:
                forked = self._ask(request, descriptors)
            else:
                forked = None
            if forked is not None:
                return Monitor(local_rank, *forked, ours)
            order = {"listener": listener.fileno(), "agent": theirs.fileno(), "local_rank": local_rank}
            if lease is not None:
                order["lease"] = lease
            process = _execute({**self._job, **order, "settings": request.settings})
            return Monitor(local_rank, process.pid, os.pidfd_open(process.pid), ours, process)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()

    def changes(self) -> list[MonitorChanged]:
        """Returns which monitors ended, were stopped or continued since the last call. Does not block."""
        while not self._gone:
            received = self._receive()
            if received is None:
                break
            self._sort(*received)
        found, self._changes = self._changes, []
        return found

    def abandon(self) -> None:
        """Has template and sweeper end all processes of the job, as if this process had been killed.

        Called at the very end of the launcher, when a thread of it is stuck in the kernel, for example on a file system
        that does not answer. SIGKILL does not end such a thread, which would keep the connections open, and nobody
        would see that the launcher is gone.
        """
        for connection in filter(None, (self.socket, self._sweeper)):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the template and its sweeper. Blocks for a second or two at most; then the template is killed.

        Monitors that still run go on. A caller ends them before.
        """
        self._end_sweeper()
        with contextlib.suppress(OSError):
            self._send(Bye(), ())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GOODBYE_S)
        self._give_up()
        self.socket.close()

    def _end_sweeper(self) -> None:
        """Asks the sweeper to end. Its parent, the template, reaps it. Where the template is gone, the sweeper may have
        become a child of this process, which then reaps it."""
        if self._sweeper is None:
            return
        pid, orphaned = self.sweeper_pid, not self.alive
        with contextlib.suppress(OSError):
            self._sweeper.send(self.goodbye)
        self._sweeper.close()
        self._sweeper = None
        if pid is not None and orphaned:
            await_child(pid, _GOODBYE_S)

    def _ask(self, request: ForkMonitor, descriptors: tuple[int, ...]) -> tuple[int, int] | None:
        """Sends a request to the template; returns pid and pidfd of the new monitor. Blocks for `_ANSWER_S` at most.

        None: the template is gone or did not answer in time, and is killed and never asked again. Changes that arrive
        before the answer are kept for `changes`.
        """
        deadline = time.monotonic() + _ANSWER_S
        try:
            if self._send(request, descriptors):
                while not self._gone and readable([self.socket.fileno()], deadline - time.monotonic()):
                    received = self._receive()
                    if received is not None:
                        forked = self._sort(*received)
                        if forked is not None:
                            return forked
        except OSError:
            pass
        self._give_up()  # A template that wakes up later must not fork a second monitor for this rank.
        return None

    def _send(self, message: Message, descriptors: tuple[int, ...]) -> bool:
        """Sends a message with copies of descriptors. Does not block; returns whether the channel has taken it."""
        self._sequence += 1
        data = codec.encode(message, self._sequence, time.monotonic_ns())
        return channel.send(self.socket, data, descriptors)

    def _receive(self) -> tuple[bytes, list[int]] | None:
        """Returns a message of the template and the descriptors that came with it. Does not block.

        None: no message is there. Empty bytes: the template is gone.
        """
        try:
            return channel.receive(self.socket, max_descriptors=1)
        except OSError:
            return b"", []

    def _sort(self, data: bytes, descriptors: list[int]) -> tuple[int, int] | None:
        """Handles one message: stores a change, returns pid and pidfd of a new monitor, or notes the template's end.

        Descriptors that came with any other message are closed.
        """
        with contextlib.suppress(ProtocolError):
            if data:
                message = codec.decode(data).message
            else:
                message = Bye()
            match message:
                case Forked(pid) if len(descriptors) == 1:
                    return pid, descriptors[0]
                case MonitorChanged():
                    self._changes.append(message)
                case Bye():
                    self._gone = True
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _give_up(self) -> None:
        """Kills the template if it still runs, and reaps it. From here on monitors are executed."""
        self._gone = True
        if self._process.poll() is None:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GOODBYE_S)


def _execute(order: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Executes this package in a new interpreter, in a session of its own, so that Ctrl-C does not reach it.

    `-I -S`: neither the user's environment, the current folder nor site-packages decide what a monitor imports.

    Args:
        order: the parameters of `rank_monitor/template.py: main`, which get there as JSON in the last argument. Values
            of the five keys below are descriptors that the new process inherits under the same numbers.
    """
    root = str(Path(contract.__file__).resolve().parents[2])
    descriptors = [order[name] for name in ("launcher", "sweeper", "listener", "agent", "lease") if name in order]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _START.format(root=root), json.dumps(order)],
        cwd="/",
        env={**os.environ, env.SIDECAR_OF: order["tag"]},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=descriptors,
        start_new_session=True,
    )
