"""The process that forks monitors and the sweeper: it has imported once what they need, and nothing more.

The launcher, a companion or the alias' server starts it (`contract/processes/spawn.py`); only the launcher's has a
sweeper. As their parent it also reports when a monitor ends, is stopped or continued. It knows nothing of ranks.

The sweeper kills what is left of a job when launcher, zygote, template and monitors were killed. It is forked first of
all, so that it costs no import, leads a session of its own, and waits in one `read` on a channel whose other end only
the launcher has: the kernel closes that however the launcher ends.

Before the first monitor is forked, the template runs one itself through one cycle, on sockets of its own (`warm_up`).
What the interpreter writes into its memory at first use (specialised code, caches of types) is then written once, in
pages that all monitors share, rather than in each of them: a quarter of a MiB less per monitor.

Where there is no template, `main` runs a single monitor.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from rank_monitor.contract.errors import ConfigError, ProtocolError
from rank_monitor.contract.processes import proc
from rank_monitor.contract.processes.fork import fork
from rank_monitor.contract.processes.runtime_folder import remove_abandoned
from rank_monitor.contract.processes.wait import await_child
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.settings.declaration import from_json
from rank_monitor.contract.wire import channel, codec
from rank_monitor.contract.wire.launcher_messages import (
    Bye,
    CycleStart,
    Forked,
    ForkMonitor,
    MonitorChanged,
    SnapshotRequest,
    StopJudging,
)
from rank_monitor.contract.wire.messages import Attach, Heartbeat, Hello, Message, Progress, Sections
from rank_monitor.log import Log
from rank_monitor.loop import Loop
from rank_monitor.lost_launcher import MonitoredJob
from rank_monitor.server import MonitorServer

# CLD_TRAPPED: a tracer stopped it (sigaction(2)); to the rank it makes no difference.
_CHANGES = {os.CLD_STOPPED: "stopped", os.CLD_TRAPPED: "stopped", os.CLD_CONTINUED: "continued"}
# A sweeper that does not end must not keep the template, which has no work left.
_END_S = 1.0
_WARM_UP_ROUNDS = 10  # CPython specialises a function in its eighth call
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGTTIN", "SIGTTOU")


def ignore_signals() -> None:
    """Ignores the signals that are meant for the launcher or the ranks (Ctrl-C, a scheduler's): the agent ends us."""
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)


class TemplateProcess:
    """Serves the launcher's requests for monitors until it sends `Bye` or its channel closes."""

    def __init__(self, launcher: int, job: MonitoredJob, sweeper: int | None = None) -> None:
        """`sweeper`: the descriptor of the channel between launcher and sweeper; None: no sweeper is started."""
        self._job = job
        self._log = Log("MonitorTemplate")
        self._sweeper = 0
        if sweeper is not None:
            self._sweeper = fork_sweeper(socket.socket(fileno=sweeper), [launcher], job, self._log)
        self._launcher = socket.socket(fileno=launcher)
        self._launcher.setblocking(True)
        self._woken, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._loop = Loop()
        self._serving = True
        self._sequence = 0
        self._settings = MonitorSettings()
        self._read_from: dict[str, Any] = {}
        self._monitors: set[int] = set()  # not reaped yet

    def run(self) -> None:
        """Serves until the launcher is gone. In a forked monitor this never returns: the monitor exits by itself."""
        # A signal with the default action or SIG_IGN writes nothing to the wakeup descriptor: it needs a handler.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._loop.watch(self._launcher.fileno(), self._serve)
        self._loop.watch(self._woken, self._report_changes)
        warm_up(self._job, self._log)
        remove_abandoned(Path(self._job.runtime_dir).parent)
        while self._serving:
            self._loop.wait(None)
        if self._sweeper:
            await_child(self._sweeper, _END_S)

    def _serve(self) -> None:
        """Handles one request."""
        try:
            # At most three come with a request: listener, agent channel, lease.
            taken = channel.receive(self._launcher, max_descriptors=3)
        except OSError:
            taken = b"", []
        data, descriptors = taken or (b"", [])
        try:
            if not data:
                self._serving = False
                self._log.warning("The launcher is gone without a goodbye: its processes on this machine are killed.")
                for pid in self._monitors:
                    os.kill(pid, signal.SIGCONT)  # a stopped one would not see that it should end
                self._job.end(self._log)
                return
            message = codec.decode(data).message
            if isinstance(message, ForkMonitor) and len(descriptors) in (2, 3):
                self._fork(message, *descriptors)
            self._serving = not isinstance(message, Bye)
        except (ProtocolError, ConfigError) as error:
            self._log.warning(f"Refused: {error}")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _fork(self, request: ForkMonitor, listener: int, agent: int, lease: int | None = None) -> None:
        """Forks a monitor. The settings are made before the fork, in pages that all monitors share."""
        if request.settings != self._read_from:
            self._settings = from_json(MonitorSettings, request.settings, "the launcher")
            self._read_from = request.settings
        # A collection in a monitor would write to the headers of all objects, and so copy the shared pages.
        gc.freeze()
        pid = fork()
        if pid == 0:
            self._become_monitor(listener, agent, request.local_rank, lease)
        self._monitors.add(pid)
        pidfd = os.pidfd_open(pid)  # not reaped yet, so it is this one
        try:
            self._send(Forked(pid), (pidfd,))
        finally:
            os.close(pidfd)

    def _become_monitor(self, listener: int, agent: int, local_rank: int, lease: int | None) -> None:
        """Never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            self._loop.close()
            self._launcher.close()
            os.close(self._woken)
            os.close(self._waker)
            proc.name_this_process(f"ft_monitor{local_rank}")
            ends = socket.socket(fileno=listener), socket.socket(fileno=agent)
            MonitorServer(*ends, self._settings, local_rank, self._job, self._log, lease).run()
            code = 0
        except BaseException:  # the edge of the process: its parent's stack must not go on in it
            with contextlib.suppress(OSError):
                traceback.print_exc(file=sys.stderr)
        os._exit(code)

    def _report_changes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        flags = os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        while True:
            try:
                child = os.waitid(os.P_ALL, 0, flags)
            except ChildProcessError:
                return
            if child is None:
                return
            change = _CHANGES.get(child.si_code, "ended")
            if change == "ended":
                self._monitors.discard(child.si_pid)
            status = child.si_status
            if child.si_code != os.CLD_EXITED:  # the number of the signal
                status = -status
            self._send(MonitorChanged(child.si_pid, change, status))

    def _send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        self._sequence += 1
        with contextlib.suppress(OSError):
            data = codec.encode(message, self._sequence, time.monotonic_ns())
            channel.send(self._launcher, data, descriptors)


def warm_up(job: MonitoredJob, log: Log) -> None:
    """Runs one cycle, with this process as the rank. Where that fails, monitors start without it. Leaves no file.

    The socket is in the runtime folder: at an abstract name any user of the machine could connect, and fill its queue.
    """
    path = Path(job.runtime_dir, "warm-up")
    with contextlib.suppress(OSError), channel.listen(path) as listener, channel.connect(path) as rank:
        path.unlink()
        _run_one_cycle(listener, rank, job, log)


def _run_one_cycle(listener: socket.socket, rank: socket.socket, job: MonitoredJob, log: Log) -> None:
    agent, monitor = channel.pair()
    with agent, monitor:
        now_ns = time.monotonic_ns()
        beats = [message for _ in range(_WARM_UP_ROUNDS) for message in (Heartbeat(), Sections((("step", now_ns),)))]
        _send(rank, [Hello(os.getpid()), Attach(), *beats, Progress(now_ns)])
        asked = [SnapshotRequest(number) for number in range(_WARM_UP_ROUNDS)]
        _send(agent, [CycleStart(0, 0, os.getpid(), 0, ""), *asked])
        server = MonitorServer(listener, monitor, MonitorSettings(), 0, job, copy.copy(log))
        server.serve_once()
        server.serve_once()
        _send(agent, [*asked, StopJudging(), Bye()])
        server.run()


def _send(end: socket.socket, messages: list[Message]) -> None:
    for message in messages:
        channel.send(end, codec.encode(message, 0, time.monotonic_ns()))


def fork_sweeper(launcher: socket.socket, unwanted: list[int], job: MonitoredJob, log: Log) -> int:
    """Starts the sweeper; returns its pid.

    Args:
        launcher: the sweeper's end of the channel to the launcher, closed in this process. The sweeper sends its pid,
            and ends when it receives anything.
        unwanted: descriptors of this process that would keep others from seeing its end.
    """
    pid = fork()
    if pid:
        launcher.close()
        return pid
    try:
        for descriptor in unwanted:
            os.close(descriptor)
        os.setsid()
        _sweep_after(launcher, job, log)
    finally:  # the frames below are the template's: nothing may come out
        os._exit(0)


def _sweep_after(launcher: socket.socket, job: MonitoredJob, log: Log) -> None:
    """Waits until the launcher says goodbye or is gone; then, in the sweeper, ends the job."""
    proc.name_this_process("ft_sweeper")
    launcher.setblocking(True)
    try:
        launcher.send(str(os.getpid()).encode())
        goodbye = launcher.recv(1)
    except OSError:
        goodbye = b""
    if not goodbye:
        log.name = "Sweeper"
        job.end(log)


def main() -> None:
    """Runs the template, or a monitor without one: whichever the last argument describes.

    It is a JSON object, as `contract/processes/spawn.py` writes it.
    """
    order = json.loads(sys.argv[-1])
    job = MonitoredJob(order["tag"], order["runtime_dir"])
    ignore_signals()
    if "launcher" in order:
        proc.name_this_process("ft_template")
        TemplateProcess(order["launcher"], job, order.get("sweeper")).run()
    else:
        settings = from_json(MonitorSettings, order["settings"], "the launcher")
        proc.name_this_process(f"ft_monitor{order['local_rank']}")
        listener, agent = socket.socket(fileno=order["listener"]), socket.socket(fileno=order["agent"])
        log, lease = Log(""), order.get("lease")
        MonitorServer(listener, agent, settings, order["local_rank"], job, log, lease).run()
