"""The zygote: a process that has imported torch and forks into ranks when the agent asks.

Runs in a fork of the launcher, or as a program of its own. `client.py` is the agent's end of the connection. The zygote
has one thread, since a fork has only the thread that forks. It never touches a GPU, since CUDA cannot be used in a fork
of a process that has used CUDA. It ends with the agent.

How ranks start:

1. The agent sends the orders of all ranks, with descriptors for their streams.
2. The zygote forks a process in between. That process forks all ranks, writes their pids to the zygote, and ends.
3. The ranks are orphans now. The kernel makes them children of the agent, which is a child subreaper.
4. The zygote sends the pids to the agent.
5. The agent writes one byte for each rank to a pipe (`GO`). Each rank reads one byte and runs its script.

So the agent can wait for the ranks as for children of its own, and no rank runs anything of the user's before the agent
knows all pids. If one fork fails, the agent closes the pipe, and the ranks that were forked end (`_become_rank`).

The agent sends three kinds of requests, and gets one answer to each, both as JSON:

    tag, preload   once, at first: imports the user's modules. Answer: `loaded`; or why ranks must be executed (`unfit`,
                   or `module` and `problem`)
    ranks          forks ranks. Answer: `pids`, or `error`
    learn          forks the zygote that is to replace this one, with modules that ranks imported. Answer: its `pids`;
                   the new zygote sends `loaded` and `learned` on a connection of its own, when it is ready

The order of imports matters: torch comes first, so that it is known which modules torch's import brings; then the
user's modules; then the client, which ranks alone need.

No rank runs its script here. A rank has the stack of the zygote, and hands a `ForkedRank` up this stack:
`_become_rank`, `_fork_ranks`, `_fork` and `serve` return it. What follows depends on how the zygote was made:

- A zygote that is a fork of the launcher was called by `ZygoteProcess.fork`, `ZygotePool.begin` and `cli.launch`. They
  return the `ForkedRank` to `cli.program` or to `ft_launcher/__main__.py`, which runs the script with it.
- A zygote that is a program of its own was called by `main`, whose caller (`client.py`) runs the script.

So the script runs in the outermost frame: its tracebacks have few frames of ours, and no frame keeps its objects alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from ft_launcher.node.processes import proc_view
from ft_launcher.node.zygote import forked_rank, module_trial, start_again
from ft_launcher.node.zygote.exchanged_names import Holdings
from ft_launcher.node.zygote.first_import import imports
from ft_launcher.node.zygote.forked_rank import ForkedRank
from ft_launcher.node.zygote.learned_modules import Surroundings
from ft_launcher.settings import rank_program, warm_start
from rank_monitor.contract import env
from rank_monitor.contract.console_line import console_line
from rank_monitor.contract.errors import FtError
from rank_monitor.contract.processes import peer_names, proc
from rank_monitor.contract.processes.descriptor import moved_up
from rank_monitor.contract.processes.fork import fork

_PR_SET_PDEATHSIG = 1
"""From prctl(2): the kernel sends this process a signal when its parent ends."""
_LENGTH = struct.Struct("!I")
"""Comes before each message: a stream of bytes has no bounds of its own."""
_MAX_DESCRIPTORS = 250
"""Descriptors of one message. The kernel's limit is 253 (SCM_MAX_FD)."""
MAX_RANKS = (_MAX_DESCRIPTORS - 2) // 3
"""Ranks of one request. Two descriptors belong to the request itself, and at most three to each rank: two streams and
the channel of a function."""
GO = b"g"
"""What lets a rank run. All ranks of a request read one pipe, one byte each; the agent writes when it has all pids."""
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGTTIN", "SIGTTOU")
"""Signals that a terminal or a user sends to the whole group. The agent decides when the zygote ends."""


class PreloadError(FtError):
    """A module of `--ft-preload` cannot be imported."""

    def __init__(self, module: str, problem: str) -> None:
        super().__init__(f"{module}: {problem}")
        self.module, self.problem = module, problem


def load_torch() -> None:
    """Imports torch and numpy. To be called before all other imports, so that it is known which modules they bring."""
    # numpy first: a script that imports only that gets it without torch.
    for module in ("numpy", "torch.distributed"):
        imports.load(module)


def preload(modules: Iterable[str]) -> None:
    """Imports the user's modules (`--ft-preload`).

    Names that an import exchanges in other modules are found by one comparison, without a trial as for learned modules:
    the first ranks wait for this.

    Raises:
        PreloadError: a module cannot be imported.
    """
    for module in modules:
        try:
            with imports.recording() as recorder:
                before = Holdings(sys.modules)
                importlib.import_module(module)
                recorder.unassigned = before.exchanges()
        except SystemExit as wish:
            raise PreloadError(module, f"it ends the interpreter when it is imported (exit {wish.code!r})") from None
        except BaseException as error:
            raise PreloadError(module, f"its import failed ({type(error).__name__}: {error})") from None


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends one message: a length, then JSON text. The descriptors travel with the length.

    Raises:
        OSError: the other end is gone or does not read.
    """
    data = json.dumps(message).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(data))], descriptors)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receives the next message with its descriptors; None when the other end is closed.

    Raises:
        OSError: nothing arrived within the connection's timeout.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, _MAX_DESCRIPTORS)
    data = bytearray()
    if len(head) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        # In pieces: the length is not trusted with memory before the bytes are there.
        while len(data) < length:
            part = connection.recv(min(1 << 20, length - len(data)))
            if not part:
                break
            data += part
        if len(data) == length:
            return json.loads(data), descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    return None


def open_descriptors() -> set[int]:
    """Returns the open descriptors of this process except 0, 1 and 2."""
    return {descriptor for descriptor in proc.own_descriptors() if descriptor > 2 and _is_open(descriptor)}


def _is_open(descriptor: int) -> bool:
    """Returns whether a descriptor is open: the one by which /proc was listed is closed again by now."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


class Zygote:
    """Serves one agent. In a rank, the object is what the rank was forked with, and is used until its script begins.

    Args:
        connection: to the agent.
        agent: pid of the agent.
        path: `sys.path` of an interpreter that does not know its script yet.
    """

    def __init__(self, connection: socket.socket, agent: int, path: Sequence[str]) -> None:
        self._connection = connection
        self._agent = agent
        self._path = path
        self._kept: set[int] = set()
        self._hidden: list[ModuleType] = []

    def serve(self, unwanted: Collection[int] = ()) -> ForkedRank:
        """Serves requests until the agent is gone, then ends this process. Returns in each rank that was forked.

        Call it where the stack is shallow: each rank keeps the frames of the callers.

        Args:
            unwanted: descriptors that the agent had open before it loaded what ranks share.
        """
        try:
            self._settle(unwanted)
            while True:
                received = receive(self._connection)
                if received is None:
                    break
                request, descriptors = received
                if "ranks" in request or "learn" in request:
                    answer = self._fork(request, descriptors)
                else:
                    answer = self._prepare(request)
                if isinstance(answer, ForkedRank):
                    return answer
                send(self._connection, answer)
        except BaseException as error:  # The frames below are the launcher's, which must not run twice.
            if not isinstance(error, OSError):
                text = f"the zygote ends: {type(error).__name__}: {error}"
                print(console_line(text, time.time()), file=sys.stderr)
        os._exit(0)

    def _settle(self, unwanted: Collection[int]) -> None:
        """Makes this process independent of the agent's terminal, session and descriptors, but not of its life."""
        end_with_parent(self._agent)
        proc.name_this_process("ft_zygote")
        with contextlib.suppress(PermissionError):  # a new process leads a session already
            os.setsid()
        for name in _IGNORED:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        for descriptor in set(unwanted) - {self._connection.fileno()}:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _prepare(self, order: dict[str, Any]) -> dict[str, Any]:
        """Imports the user's modules and what every rank needs.

        Returns:
            The answer to the agent: the loaded modules, or why ranks cannot be forks of this process.
        """
        proc_view.show(["ft_zygote"], {**os.environ, env.JOB_TAG: order["tag"]})
        try:
            preload(order["preload"])
        except PreloadError as error:
            return {"module": error.module, "problem": error.problem}
        if order["preload"]:
            reason = _against_this_process()
            if reason:
                return {"unfit": reason}
        self._kept = open_descriptors() - {self._connection.fileno()}
        import torch.distributed

        from ft_client import bootstrap  # Imported here: only ranks need the client, the agent does not know it.

        bootstrap.load()
        peer_names.look_up_no_more(torch)  # So the ranks do not look up names either, when they make their groups.
        return self._ready()

    def _ready(self) -> dict[str, Any]:
        """Hides what is loaded, for all later ranks at once; returns the answer with the loaded modules."""
        loaded = {name: getattr(module, "__file__", None) for name, module in sys.modules.items() if "." not in name}
        self._hide_launcher()
        forked_rank.mark_preloaded()
        return {"loaded": loaded}

    def _hide_launcher(self) -> None:
        """Removes the launcher's modules and loggers from the process: a rank started by exec has none of them."""
        for name in [name for name in sys.modules if name.partition(".")[0] == "ft_launcher"]:
            self._hidden.append(sys.modules.pop(name))
        loggers = logging.root.manager.loggerDict
        for name in [name for name in loggers if name.partition(".")[0] == "ft_launcher"]:
            del loggers[name]

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any] | ForkedRank:
        """Has a process in between fork ranks or the next zygote, and waits until that process has ended.

        Args:
            request: of the agent.
            descriptors: that came with the request. They are closed here, but not in a forked process: by then their
                numbers may belong to other files there.

        Returns:
            In the zygote: the answer to the agent, with the pids or the error. In a rank: that rank. In the next
            zygote: its own first answer to the agent.
        """
        reader, writer = os.pipe()
        try:
            # Orphans of the process in between go to the agent, which is a child subreaper: so it can wait for them.
            between = fork()
        except OSError as error:
            os.close(writer)
            answer: dict[str, Any] = {"error": f"{error.strerror} when forking"}
        else:
            if between == 0:
                os.close(reader)
                if "ranks" in request:
                    return self._fork_ranks(request, descriptors, writer)
                return self._fork_next(request, descriptors, writer)
            os.close(writer)
            with os.fdopen(os.dup(reader), "rb") as pipe:
                text = pipe.read()
            os.waitpid(between, 0)
            answer = {"error": "the process that forks the ranks was killed"}
            if text:
                answer = json.loads(text)
        for descriptor in (reader, *descriptors):
            os.close(descriptor)
        return answer

    def _fork_next(self, request: dict[str, Any], descriptors: list[int], writer: int) -> dict[str, Any]:
        """Forks the zygote that is to replace this one. Called in the process in between, which ends here.

        Returns only in the new zygote, when its imports are done. The new zygote has a connection of its own to the
        agent, which is the only descriptor of the request. This zygote goes on serving.
        """
        between = os.getpid()
        try:
            pid = fork()
            if pid != 0:
                os.write(writer, json.dumps({"pids": [pid]}).encode())
                os._exit(0)
            os.close(writer)
            self._connection.close()
            self._connection = socket.socket(fileno=descriptors[0])
            # `_settle` has the kernel end this process with its parent, which must be the agent by then.
            while os.getppid() == between:
                time.sleep(0.0002)
            self._settle(())
            gc.disable()  # `mark_preloaded` enables it
            this = os.getpid()
            environ = Surroundings(request["differing"], request["changed"])
            learned = module_trial.learn(request["learn"], environ, lambda: end_with_parent(this))
            reason = _against_this_process()
            if reason:
                return {"unfit": reason}
            return {**self._ready(), "learned": learned}
        except BaseException as error:  # The edge of a process: whatever goes wrong, the present zygote goes on.
            return {"unfit": f"{type(error).__name__}: {error}"}

    def _fork_ranks(self, request: dict[str, Any], descriptors: list[int], writer: int) -> ForkedRank:
        """Forks the ranks. Called in the process in between, which ends here; returns in each rank.

        After a failed fork the answer is an error, and the ranks that were forked before never run.
        """
        answer: dict[str, Any] = {"pids": []}
        # Blocked until the rank has the handlers of a new process. The zygote ignores these signals, and a signal that
        # arrived meanwhile would be lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {getattr(signal, name) for name in _IGNORED})
        for rank in request["ranks"]:
            try:
                pid = fork()
            except OSError as error:
                answer = {"error": f"{error.strerror} when forking"}
                break
            if pid == 0:
                return self._become_rank({**request["all"], **rank}, descriptors, mask)
            answer["pids"].append(pid)
        with contextlib.suppress(OSError):
            os.write(writer, json.dumps(answer).encode())
        os._exit(0)

    def _become_rank(self, fields: dict[str, Any], descriptors: list[int], mask: Collection[int]) -> ForkedRank:
        """Makes this fork a rank, and waits until the agent has all pids. Returns the rank, which the caller runs.

        Ends the process if the agent closes the pipe of `GO` instead: then no rank of the request may run.

        Args:
            fields: of the rank's order, together with what is the same for all ranks.
            descriptors: of the request; `fields` names each by its position.
            mask: the blocked signals of a new process.
        """
        streams: dict[str, int] = fields.pop("streams")
        arguments: list[str] = fields["arguments"]
        place = fields.pop("channel", None)
        reports_modules: bool = fields.pop("reports_modules", False)
        if place is None:
            channel = set()
        else:
            channel = {descriptors[place]}
        arguments += map(str, channel)
        try:
            os.setsid()
            # Moved to a high number: the script must find the low numbers free, as in a fresh interpreter.
            go, report_to = descriptors[0], moved_up(descriptors[1])
            for number, place in streams.items():
                os.dup2(descriptors[place], int(number))
            self._connection.detach()
            for descriptor in open_descriptors() - self._kept - channel - {go, report_to}:
                os.close(descriptor)
            order = forked_rank.ForkOrder(**fields)
            forked_rank.become(order, rank_program.bootstrap(), self._path)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            from ft_client import bootstrap

            if os.read(go, 1) != GO:
                os._exit(0)
            os.close(go)
            end_with_parent(self._agent)
        except BaseException as error:  # The edge of a process: what goes wrong here must not end the training.
            _execute(error, arguments, fields["environ"], channel, mask)
        if is_safe_path():
            first_path = None
        else:
            first_path = fields["cwd"] or ""

        def make() -> bootstrap.Rank:
            program = bootstrap.Rank(bootstrap.main_of(arguments, first_path), bootstrap.prepare(reports_modules))
            start_again.FirstImport(order, report_to, kept=channel, given_back=program.act_on_loaded).begin()
            return program

        return ForkedRank(make)


def _execute(
    error: BaseException,
    arguments: Sequence[str],
    environ: dict[str, str],
    channel: Collection[int],
    mask: Collection[int],
) -> NoReturn:
    """Starts by exec a rank that failed to become one as a fork: it needs nothing of what has failed.

    Args:
        error: what went wrong, for the log.
        arguments: of the rank.
        environ: of the rank.
        channel: the descriptor of a function's channel, which must outlive the exec; empty: there is none.
        mask: the blocked signals of a new process.
    """
    text = f"this rank starts by exec: {type(error).__name__}: {error}"
    print(console_line(text, time.time()), file=sys.stderr)
    with contextlib.suppress(BaseException):
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for descriptor in channel:
            os.set_inheritable(descriptor, True)
        os.execve(sys.executable, [sys.executable, "-u", rank_program.bootstrap(), *arguments], environ)
    os._exit(1)


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends; ends it at once if `parent` has ended already.

    A launcher that is killed by SIGKILL together with its sweeper must not leave ranks behind.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The process in between may be the parent for a moment longer, and is about to end.
    deadline = time.monotonic() + 1.0
    while os.getppid() != parent:
        # The signal is only for a parent that ends later; one that ended before leaves another parent.
        if os.getppid() == 1 or time.monotonic() > deadline:
            os._exit(0)
        time.sleep(0.0002)


def is_safe_path() -> bool:
    """Returns whether the interpreter runs with -I or -P, and so puts no folder of its own first into `sys.path`."""
    return bool(sys.flags.isolated or getattr(sys.flags, "safe_path", False))


def _against_this_process() -> str:
    """Returns why this process cannot be forked into ranks; empty: it can.

    Forks once for nothing: libraries with a handler for forks (OpenBLAS) end their threads for it, and such threads are
    no reason against forks.
    """
    child = fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return warm_start.against_process(threads_here(), sys.modules["torch"].cuda.is_initialized(), _device_files())


def threads_here() -> int:
    """Returns how many threads this process has, those of C libraries included."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 (only counted)


def _device_files() -> list[str]:
    """Returns the open device files of GPU drivers: any of them means that a driver was initialised."""
    found = []
    for descriptor in open_descriptors():
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 (it may be no path)
    return [path for path in found if path.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))]


def main(path: Sequence[str]) -> ForkedRank:
    """Runs a zygote as a program of its own; returns in each rank, which the caller runs.

    The last argument of the command line is JSON, as `ZygoteProcess.spawn` writes it.
    """
    order = json.loads(sys.argv[-1])
    connection = socket.socket(fileno=order["connection"])
    if order["path"] is not None:
        sys.path[:] = path = order["path"]
    load_torch()
    return Zygote(connection, order["agent"], path).serve()
