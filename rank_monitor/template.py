"""The template: the process that forks monitors and the sweeper. It has imported what these need, once, and nothing
more.

The launcher, a standalone agent or the alias' server starts it (`contract/processes/spawn.py: Template.start`); only
the launcher's template has a sweeper. As the parent of all monitors the template also reports when one ends, is stopped
or continued. Nothing is known here of ranks.

**Sequence.** The launcher executes `main` in a new interpreter. The template forks the sweeper, runs one monitor itself
to warm up (below), removes runtime folders that dead launchers have left, and then serves requests (`ForkMonitor`)
until `Bye` or until the launcher is gone. In the latter case it kills every process of the job, as each monitor does:
one survivor is enough.

**The sweeper** kills what is left of a job when launcher, zygote, template and monitors were all killed at once. It is
forked first of all, so that it costs no import. It leads a session of its own, and waits in one `read` on a channel
whose other end the launcher alone has: the kernel closes that end however the launcher ends.

**The warm-up.** Before the first monitor is forked, the template runs a monitor itself through one cycle, on sockets of
its own (`warm_up`). What the interpreter writes into its memory at first use (specialised code, caches of types) is
then written once, in pages that all monitors share, rather than in each of them: a quarter of a MiB less per monitor.

Threads: none. A template with threads could not fork safely.

Where the template is gone, the launcher executes each further monitor by itself: `main` then runs a single monitor.
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
    MAX_GOODBYE,
    NOTHING_LEFT,
    Bye,
    CycleStart,
    Forked,
    ForkMonitor,
    MonitorChanged,
    SnapshotRequest,
    StopJudging,
    TimesRequest,
)
from rank_monitor.contract.wire.messages import Attach, Heartbeat, Hello, Message, Progress, Sections
from rank_monitor.log import Log
from rank_monitor.loop import Loop
from rank_monitor.lost_launcher import MonitoredJob
from rank_monitor.server import MonitorServer

_CHANGES = {os.CLD_STOPPED: "stopped", os.CLD_TRAPPED: "stopped", os.CLD_CONTINUED: "continued"}
"""`si_code` of a child -> the word of `MonitorChanged`. CLD_TRAPPED: a tracer stopped the monitor (sigaction(2)); the
rank is as unwatched as after a stop."""
_END_S = 1.0
"""How long the template waits for its sweeper at its own end: a sweeper that does not end must not keep the template,
which has no work left."""
_WARM_UP_ROUNDS = 10
"""How often each message is sent in the warm-up: CPython specialises a function in its eighth call."""
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGTTIN", "SIGTTOU")
"""Signals that a terminal, a user or a scheduler sends to the whole process group, or to all processes of a job."""


def ignore_signals() -> None:
    """Ignores the signals that are meant for the launcher or the ranks (Ctrl-C, a scheduler's).

    The template and the monitors must outlive the ranks that such a signal ends. The launcher ends them.
    """
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)


class TemplateProcess:
    """Serves the launcher's requests for monitors until the launcher sends `Bye` or its channel closes.

    Args:
        launcher: descriptor of this end of the channel to the launcher.
        job: what is killed if the launcher is gone without `Bye`.
        sweeper: descriptor of the sweeper's end of its channel to the launcher; None: no sweeper is started.
    """

    def __init__(self, launcher: int, job: MonitoredJob, sweeper: int | None = None) -> None:
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
        """The JSON of `_settings`: settings that come with every request are read once."""
        self._monitors: set[int] = set()
        """Pids of the monitors that are not reaped yet."""

    def run(self) -> None:
        """Serves until the launcher is gone. Blocks. In a forked monitor this never returns: the monitor exits by
        itself, below a frame of this method."""
        # Python writes to the wakeup descriptor for signals with a handler only, not for SIG_DFL and SIG_IGN.
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
        """Handles one request of the launcher, or the end of the launcher. Called by the loop.

        A request that makes no sense is refused with a log line, and the launcher's `fork_monitor` times out. The
        descriptors that came with a request are closed here in any case: the monitor has its own copies by the fork.
        """
        try:
            # At most three descriptors come with a request: listener, agent channel, lease.
            received = channel.receive(self._launcher, max_descriptors=3)
        except OSError:
            received = b"", []
        data, descriptors = received or (b"", [])
        try:
            if not data:
                self._serving = False
                self._log.warning("The launcher is gone without a goodbye: its processes on this machine are killed.")
                for pid in self._monitors:
                    os.kill(pid, signal.SIGCONT)  # a stopped monitor would not see that it should end
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
        """Forks a monitor, and answers with its pid and pidfd. Returns in the template only.

        The settings are made before the fork, in pages that all monitors share.
        """
        if request.settings != self._read_from:
            self._settings = from_json(MonitorSettings, request.settings, "the launcher")
            self._read_from = request.settings
        # A collection in a monitor would write to the headers of all objects, and so copy the shared pages.
        gc.freeze()
        pid = fork()
        if pid == 0:
            self._become_monitor(listener, agent, request.local_rank, lease)
        self._monitors.add(pid)
        pidfd = os.pidfd_open(pid)  # the pid cannot have been reused: this process has not reaped the child yet
        try:
            self._send(Forked(pid), (pidfd,))
        finally:
            os.close(pidfd)

    def _become_monitor(self, listener: int, agent: int, local_rank: int, lease: int | None) -> None:
        """Makes this fork of the template a monitor, and runs it. Never returns: the process exits with 0, or with 1
        after an error.

        What is the template's is closed first: while a copy of the template's channel is open here, the launcher would
        not see that the template was killed.
        """
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
        except BaseException:  # the edge of the process: the frames of the template must not go on in the monitor
            with contextlib.suppress(OSError):
                traceback.print_exc(file=sys.stderr)
        os._exit(code)

    def _report_changes(self) -> None:
        """Reports each monitor that has ended, was stopped or continued. Called by the loop after a SIGCHLD.

        One signal may stand for several children, so all of them are asked for. The sweeper is a child as well; the
        launcher ignores a change of a pid that is no monitor's.
        """
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
            if child.si_code != os.CLD_EXITED:  # then the status is the number of a signal
                status = -status
            self._send(MonitorChanged(child.si_pid, change, status))

    def _send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Sends a message to the launcher; one that cannot be sent is dropped, since reading shows the same end."""
        self._sequence += 1
        with contextlib.suppress(OSError):
            data = codec.encode(message, self._sequence, time.monotonic_ns())
            channel.send(self._launcher, data, descriptors)


def warm_up(job: MonitoredJob, log: Log) -> None:
    """Runs a monitor through one cycle in this process, with this process as the rank. Leaves no file. Takes some ms.

    Where the warm-up fails, monitors start without it. The socket is in the runtime folder: at an abstract name any
    user of the machine could connect, and fill the socket's queue.
    """
    path = Path(job.runtime_dir, "warm-up")
    with contextlib.suppress(OSError), channel.listen(path) as listener, channel.connect(path) as rank:
        path.unlink()
        _run_one_cycle(listener, rank, job, log)


def _run_one_cycle(listener: socket.socket, rank: socket.socket, job: MonitoredJob, log: Log) -> None:
    """Sends what rank and agent send in a cycle, and has a server handle it: two turns of the loop while the cycle
    runs, then its end."""
    agent, monitor = channel.pair()
    with agent, monitor:
        now_ns = time.monotonic_ns()
        beats = [message for _ in range(_WARM_UP_ROUNDS) for message in (Heartbeat(), Sections((("step", now_ns),)))]
        _send(rank, [Hello(os.getpid()), Attach(), *beats, Progress(now_ns)])
        asked = [message for number in range(_WARM_UP_ROUNDS) for message in (SnapshotRequest(number), TimesRequest())]
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
    """Forks the sweeper. Returns its pid, in the calling process only.

    Args:
        launcher: the sweeper's end of the channel to the launcher, closed in this process. The sweeper sends its pid
            over it, and ends when it receives the goodbye (`launcher_messages.NOTHING_LEFT`).
        unwanted: descriptors of this process that the sweeper closes: with a copy in the sweeper, the other end would
            not see the end of this process.
        job: what the sweeper kills if the channel closes without a word.
        log: the sweeper's log.
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
    finally:  # the frames below are the template's: no exception may reach them
        os._exit(0)


def _sweep_after(launcher: socket.socket, job: MonitoredJob, log: Log) -> None:
    """Runs the sweeper: waits until the launcher says goodbye or is gone.

    If the launcher is gone, kills the job's processes. After a goodbye, frees the memory of the training's state where
    the launcher has left that: its end must not wait for it.
    """
    proc.name_this_process("ft_sweeper")
    launcher.setblocking(True)
    try:
        launcher.send(str(os.getpid()).encode())
        goodbye = launcher.recv(MAX_GOODBYE)
    except OSError:
        goodbye = b""
    if not goodbye:
        log.name = "Sweeper"
        job.end(log)
        return
    if goodbye != NOTHING_LEFT:
        # Imported here: few jobs need it.
        from rank_monitor.memory_linger import after_goodbye

        after_goodbye(Path(os.fsdecode(goodbye)))


def main() -> None:
    """Runs the template, or one monitor without a template. The last argument of the command line says which.

    That argument is a JSON object, as `contract/processes/spawn.py: _execute` writes it: the job's tag and runtime
    folder, and descriptors that this process has inherited. `launcher` among them asks for the template.
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
