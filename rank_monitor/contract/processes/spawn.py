"""Starts monitors: by a template process that forks them, or one by one where the template is gone.

The launcher, the companion of a rank, and the alias' `RankMonitorServer` call it. Standard library only, and usable
before torch is imported. A forked child of the caller that lives on must close what is held here: while a copy of a
channel is open, the other end does not see that the caller was killed.
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
from rank_monitor.contract.wire.launcher_messages import Bye, Forked, ForkMonitor, MonitorChanged
from rank_monitor.contract.wire.messages import Message

# A template that is stopped holds up the launcher for this long; then the monitor is executed without it.
_ANSWER_S = 5.0
# A monitor or template that was asked to end and has not by then is stopped or stuck, and is killed.
_GOODBYE_S = 1.0
# A 64-bit number has at most this many digits.
_MAX_DIGITS = 20
# Appended, so that a file of another package can never stand in for a module of the standard library.
_START = "import sys; sys.path.append({root!r}); from rank_monitor.template import main; main()"


@dataclass
class Monitor:
    """A monitor that runs: pid, pidfd, and our end of the channel to it (not blocking). The caller closes it."""

    local_rank: int
    pid: int
    pidfd: int
    channel: socket.socket
    _process: subprocess.Popen[bytes] | None = None

    def close(self, goodbye_s: float = _GOODBYE_S, last: Callable[[], object] = lambda: None) -> None:
        """Ends the monitor: `Bye`, then SIGKILL if it has not exited after `goodbye_s` seconds. Blocks until then.

        Args:
            last: called when it has ended: what it sent is still in the channel.
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
    """The launcher's handle of the template process. Create it with `start`."""

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
        self._changes: list[MonitorChanged] = []
        self._gone = False
        self._sequence = 0

    @classmethod
    def start(cls, tag: str, runtime_dir: Path, sweeper: bool = False) -> Template:
        """Starts the process and returns at once.

        Args:
            tag: marks the job's processes in their environment; they are killed when the caller was killed.
            runtime_dir: removed in the same case.
            sweeper: whether to fork the sweeper, which does the same when all other processes are killed at once.
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
        """The pid of the template; None when it has ended."""
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
        """Whether the template can fork monitors and report changes."""
        return not self._gone and self._process.poll() is None

    def fileno(self) -> int:
        """A descriptor that is readable when there are changes, or when the template is gone."""
        return self.socket.fileno()

    def fork_monitor(
        self, listener: socket.socket, settings: MonitorSettings, local_rank: int, lease: int | None = None
    ) -> Monitor:
        """Starts a monitor on a listening socket. Blocks for 5 s at most.

        A template that is gone or does not answer is given up, and the monitor is executed directly: then only its
        pidfd shows its end.

        Args:
            lease: a timer; the monitor ends its rank when it is readable.

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
        """The changes of monitors since the last call. Does not block."""
        while not self._gone:
            taken = self._receive()
            if taken is None:
                break
            self._sort(*taken)
        found, self._changes = self._changes, []
        return found

    def abandon(self) -> None:
        """Has template and sweeper end all processes of the job, as if this process had been killed.

        For its very end: a thread in the kernel that SIGKILL does not end would keep the connections open.
        """
        for connection in filter(None, (self.socket, self._sweeper)):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the template and its sweeper; monitors that run go on. Waits a second at most, then kills it."""
        self._end_sweeper()
        with contextlib.suppress(OSError):
            self._send(Bye(), ())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GOODBYE_S)
        self._give_up()
        self.socket.close()

    def _end_sweeper(self) -> None:
        """Asks the sweeper to end. The template reaps it; where that is gone, this process does if it is its child."""
        if self._sweeper is None:
            return
        pid, orphaned = self.sweeper_pid, not self.alive
        with contextlib.suppress(OSError):
            self._sweeper.send(b"!")
        self._sweeper.close()
        self._sweeper = None
        if pid is not None and orphaned:
            await_child(pid, _GOODBYE_S)

    def _ask(self, request: ForkMonitor, descriptors: tuple[int, ...]) -> tuple[int, int] | None:
        """Pid and pidfd of the new monitor; None when the template does not deliver."""
        deadline = time.monotonic() + _ANSWER_S
        try:
            if self._send(request, descriptors):
                while not self._gone and readable([self.socket.fileno()], deadline - time.monotonic()):
                    taken = self._receive()
                    if taken is not None:
                        forked = self._sort(*taken)
                        if forked is not None:
                            return forked
        except OSError:
            pass
        self._give_up()  # should it wake up later, it must not fork a second monitor for this rank
        return None

    def _send(self, message: Message, descriptors: tuple[int, ...]) -> bool:
        self._sequence += 1
        data = codec.encode(message, self._sequence, time.monotonic_ns())
        return channel.send(self.socket, data, descriptors)

    def _receive(self) -> tuple[bytes, list[int]] | None:
        try:
            return channel.receive(self.socket, max_descriptors=1)
        except OSError:
            return b"", []

    def _sort(self, data: bytes, descriptors: list[int]) -> tuple[int, int] | None:
        """Handles one message: stores a change, returns pid and pidfd of a new monitor, or notes the template's end."""
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
        self._gone = True
        if self._process.poll() is None:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GOODBYE_S)


def _execute(order: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Executes this package in a new interpreter, in a session of its own.

    `-I -S`: neither the user's environment, the current folder nor site-packages decide what a monitor imports.
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
