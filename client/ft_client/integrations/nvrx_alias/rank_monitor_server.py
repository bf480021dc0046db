"""`RankMonitorServer`: a monitor that a script starts by itself, where it wants it, without our launcher.

For scripts that are written for NVIDIA's package and are not started by a launcher that has monitors. A child process
of the script holds the listening socket and acts as the agent of one of our monitors. It ends with the script, or when
the script terminates it. Ranks come and go: after the end of one rank the next rank that connects is watched.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess, parent_process
from pathlib import Path
from typing import Any

from ft_client.inprocess.standalone import launcher_parts
from rank_monitor.contract import env
from rank_monitor.contract.errors import FtError
from rank_monitor.contract.processes import runtime_folder
from rank_monitor.contract.processes.spawn import Template
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.settings.declaration import declarations, from_json, parse, to_json
from rank_monitor.contract.wire import channel

_START_S = 60.0
"""Seconds for the child to listen: a new interpreter may import from a slow file system."""
_numbers = itertools.count()


class RankMonitorServer:
    """The peer's class of this name, of which scripts use the start alone. Never made.

    Not our own monitor's class, which is `rank_monitor/server.py: MonitorServer`.
    """

    @staticmethod
    def run_in_subprocess(
        cfg: Any,
        ipc_socket_path: str,
        is_restarter_logger: bool = False,
        mp_ctx: BaseContext | None = None,
    ) -> BaseProcess:
        """Starts a monitor; a rank finds it by FT_RANK_MONITOR_IPC_SOCKET.

        Args:
            cfg: a `FaultToleranceConfig`. FT_<KEY> variables take precedence over its values.
            ipc_socket_path: where the monitor listens. A socket that was left there is removed.
            is_restarter_logger: accepted for code written for the peer; our monitor has one logger.
            mp_ctx: how the process is made; None: spawn.

        Returns:
            The process, which listens by now. `terminate()` ends the process and its monitor; so does the end of the
            caller.

        Raises:
            ConfigError: a value of `cfg` or of a variable is wrong.
            FtError: the process cannot start, or another monitor listens there.
        """
        settings = to_json(_settings(cfg))
        context: Any = mp_ctx or multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        place = (settings, str(ipc_socket_path), next(_numbers), theirs)
        process: BaseProcess = context.Process(target=serve, args=place, name="RankMonitorServer", daemon=True)
        process.start()
        theirs.close()
        try:
            if ours.poll(_START_S):
                problem = ours.recv()
            else:
                problem = f"it says nothing for {_START_S:g} s"
        except EOFError:
            problem = "it ended"
        ours.close()
        if problem:
            process.kill()
            process.join()
            raise FtError(f"the monitor at {ipc_socket_path} cannot be started: {problem}")
        return process


def _settings(cfg: Any) -> MonitorSettings:
    """Returns the monitor's settings: from FT_<KEY> variables, else from `cfg`, else their defaults.

    Raises:
        ConfigError: a value is wrong.
    """
    values = {}
    for key in declarations(MonitorSettings):
        variable = env.of_setting(key)
        if variable in os.environ:
            values[key] = parse(MonitorSettings, key, os.environ[variable], variable)
        elif hasattr(cfg, key):
            values[key] = parse(MonitorSettings, key, getattr(cfg, key), "FaultToleranceConfig")
    # No limit for a first connection: which process will be the rank is not known before it connects.
    values["connect_timeout"] = None
    return MonitorSettings(**values)


def serve(settings: dict[str, Any], path: str, number: int, ready: Connection) -> None:
    """The child's main function. Blocks until the parent ends, or SIGTERM comes.

    Args:
        settings: the monitor's settings, as JSON values.
        path: where to listen.
        number: the number of the monitor, for its log.
        ready: gets the text of an error, or an empty text when the socket listens.
    """
    try:
        woken = _woken_by_signals()
        listener = _listen(Path(path))
    except OSError as error:
        ready.send(str(error))
        return
    try:
        station = _Station(listener, from_json(MonitorSettings, settings, "the caller"), number)
        ready.send("")
        ready.close()
        station.run(woken)
    finally:
        with contextlib.suppress(OSError):
            Path(path).unlink()


class _Station:
    """Acts as the agent of a monitor without a launcher: tells the monitor of each rank that connects."""

    def __init__(self, listener: socket.socket, settings: MonitorSettings, number: int) -> None:
        folder, tag = runtime_folder.make()[0], f"alias-{os.getpid()}-{number}"
        runtime = launcher_parts.Runtime(tag, folder, Template.start(tag, folder))
        self._number, self._started_ns = number, time.monotonic_ns()
        self._monitor = launcher_parts.SingleMonitor(runtime, listener, number, settings, _say)
        self._begin()
        self._rank: tuple[int, int] | None = None

    def run(self, woken: int) -> None:
        """Serves until `woken` is readable or the parent is gone. Blocks.

        Wakes when the monitor sends something, when the rank ends, or at one of the two ends of the service.
        """
        parent = parent_process()
        ends = {woken}
        if parent is not None:
            ends.add(parent.sentinel)
        try:
            while True:
                awaited = set(ends)
                if self._rank is not None:
                    awaited.add(self._rank[1])
                ready = self._monitor.wait(awaited)
                if ready & ends:
                    return
                self._monitor.handle()
                if self._rank is not None and self._rank[1] in ready:
                    self._next_rank()
                self._check_rank()
        finally:
            self._monitor.close()

    def _check_rank(self) -> None:
        """Follows the process that is connected now: its end is what the next rank waits for."""
        pid = self._monitor.report.client_pid
        if not pid or (self._rank is not None and self._rank[0] == pid):
            return
        self._close_pidfd()
        try:
            self._rank = pid, os.pidfd_open(pid)
        except ProcessLookupError:
            self._next_rank()

    def _next_rank(self) -> None:
        """Begins anew after the end of a rank: what the monitor knows of it must not be held against the next rank."""
        self._close_pidfd()
        self._begin()

    def _begin(self) -> None:
        """This process stands for the rank until one connects: nothing is judged before that."""
        self._monitor.begin(self._number, os.getpid(), self._started_ns)

    def _close_pidfd(self) -> None:
        """Closes the pidfd of the rank that was followed."""
        if self._rank is not None:
            os.close(self._rank[1])
            self._rank = None


def _listen(path: Path) -> socket.socket:
    """Returns a listening socket at `path`. A socket file at which nobody listens is removed first.

    Raises:
        FileExistsError: another monitor listens there.
        OSError: the socket cannot be made.
    """
    try:
        channel.connect(path).close()
    except OSError:  # nobody listens
        if path.is_socket():
            path.unlink()
        return channel.listen(path)
    raise FileExistsError(f"another monitor listens at {path}")


def _woken_by_signals() -> int:
    """Returns a descriptor that SIGTERM makes readable. Ctrl-C is left to the caller, which ends this process then."""
    woken, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    return woken


def _say(text: str) -> None:
    print(f"ft_client: {text}", file=sys.stderr)
