"""The zygote: a process that has imported torch and forks into ranks when the agent asks.

It has one thread, never touches a GPU, and ends with the agent. Ranks become the agent's children: a process in between
forks them all and ends. They do nothing of the user's before the agent has their pids and lets them go.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from typing import Any

from ft_launcher import forked_rank, proc_view, script, start_again, warm_start
from ft_launcher.first_import import imports
from ft_launcher.forked_rank import ForkedRank
from rank_monitor.contract import env
from rank_monitor.contract.descriptor import moved_up
from rank_monitor.contract.errors import FtError

_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("!I")
_MAX_DESCRIPTORS = 250  # the kernel's limit per message is 253
MAX_RANKS = (_MAX_DESCRIPTORS - 2) // 3
"""Ranks of one request."""
_GO = b"g"
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGTTIN", "SIGTTOU")


class PreloadError(FtError):
    """A module that the user wants to be imported before the ranks fork cannot be."""

    def __init__(self, module: str, problem: str) -> None:
        super().__init__(f"{module}: {problem}")
        self.module, self.problem = module, problem


def load_torch() -> None:
    """Imports what all ranks share, whatever the user preloads: first of all, so that it is known what that brings."""
    for module in ("numpy", "torch.distributed"):
        imports.load(module)


def preload(modules: Iterable[str]) -> None:
    """Imports the user's modules.

    Raises:
        PreloadError: one of them cannot be imported.
    """
    for module in modules:
        try:
            imports.load(module)
        except SystemExit as wish:
            raise PreloadError(module, f"it ends the interpreter when it is imported (exit {wish.code!r})") from None
        except BaseException as error:
            raise PreloadError(module, f"its import failed ({type(error).__name__}: {error})") from None


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends one message.

    Raises:
        OSError: the other end is gone or does not read.
    """
    data = json.dumps(message).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(data))], descriptors)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message with its descriptors; None when the other end is gone.

    Raises:
        OSError: nothing came in time, where the connection has a limit.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, _MAX_DESCRIPTORS)
    data = bytearray()
    if len(head) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        while len(data) < length and (part := connection.recv(min(1 << 20, length - len(data)))):
            data += part
        if len(data) == length:
            return json.loads(data), descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    return None


def open_descriptors() -> set[int]:
    """The open descriptors of this process beyond the three of every process."""
    listed = {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208 (one is the listing's own)
    return {descriptor for descriptor in listed - {0, 1, 2} if _is_open(descriptor)}


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


class Zygote:
    """Serves one agent.

    Args:
        connection: to the agent.
        agent: its pid.
        path: `sys.path` of an interpreter that does not know its script yet.
    """

    def __init__(self, connection: socket.socket, agent: int, path: Sequence[str]) -> None:
        self._connection = connection
        self._agent = agent
        self._path = path
        self._kept: set[int] = set()
        self._hidden: list[ModuleType] = []

    def serve(self, unwanted: Collection[int] = ()) -> ForkedRank:
        """Serves until the agent is gone, then ends this process; returns in each rank that was forked.

        It is called where the stack is shallow, since ranks have the frames from which it was called.

        Args:
            unwanted: descriptors that the agent had open before it loaded what ranks share.
        """
        try:
            self._settle(unwanted)
            while (taken := receive(self._connection)) is not None:
                request, descriptors = taken
                answer = self._start_ranks(request, descriptors) if "ranks" in request else self._prepare(request)
                if isinstance(answer, ForkedRank):
                    return answer
                send(self._connection, answer)
        except BaseException as error:  # the frames below are the agent's: nothing may come out
            if not isinstance(error, OSError):
                print(f"ft_launcher: the zygote ends: {type(error).__name__}: {error}", file=sys.stderr)
        os._exit(0)

    def _settle(self, unwanted: Collection[int]) -> None:
        end_with_parent(self._agent)
        proc_view.name("ft_zygote")
        with contextlib.suppress(PermissionError):  # a new process leads a session already
            os.setsid()
        for name in _IGNORED:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        for descriptor in set(unwanted) - {self._connection.fileno()}:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _prepare(self, order: dict[str, Any]) -> dict[str, Any]:
        """Imports what the user preloads; returns what this process has loaded, or why ranks cannot be forks of it."""
        proc_view.show(["ft_zygote"], {**os.environ, env.JOB_TAG: order["tag"]})
        try:
            preload(order["preload"])
        except PreloadError as error:
            return {"module": error.module, "problem": error.problem}
        if order["preload"] and (why := _against_this_process()):
            return {"unfit": why}
        self._kept = open_descriptors() - {self._connection.fileno()}
        from ft_client import bootstrap  # here: it is not the agent's to know

        bootstrap.load()
        loaded = {name: getattr(module, "__file__", None) for name, module in sys.modules.items() if "." not in name}
        self._hide_launcher()
        forked_rank.mark_preloaded()
        return {"loaded": loaded}

    def _hide_launcher(self) -> None:
        """Takes away the launcher's modules and loggers: a rank that was started by exec has none of them."""
        for name in [name for name in sys.modules if name.partition(".")[0] == "ft_launcher"]:
            self._hidden.append(sys.modules.pop(name))
        loggers = logging.root.manager.loggerDict
        for name in [name for name in loggers if name.partition(".")[0] == "ft_launcher"]:
            del loggers[name]

    def _start_ranks(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any] | ForkedRank:
        """Forks what is asked for; returns pids, or what went wrong. In a rank: that rank.

        Nothing is tidied up on the way out of a rank: the numbers of its descriptors are others by then.
        """
        reader, writer = os.pipe()
        try:
            between = os.fork()
        except OSError as error:
            os.close(writer)
            answer: dict[str, Any] = {"error": f"{error.strerror} when forking"}
        else:
            if between == 0:
                os.close(reader)
                return self._fork_ranks(request, descriptors, writer)
            os.close(writer)
            answer = _answer_of(between, reader)
        for descriptor in (reader, *descriptors):
            os.close(descriptor)
        return answer

    def _fork_ranks(self, request: dict[str, Any], descriptors: list[int], writer: int) -> ForkedRank:
        """In the process in between, which ends here. Ranks of a failed request end when nobody lets them go."""
        answer: dict[str, Any] = {"pids": []}
        for rank in request["ranks"]:
            try:
                pid = os.fork()
            except OSError as error:
                answer = {"error": f"{error.strerror} when forking"}
                break
            if pid == 0:
                return self._become_rank({**request["all"], **rank}, descriptors)
            answer["pids"].append(pid)
        with contextlib.suppress(OSError):
            os.write(writer, json.dumps(answer).encode())
        os._exit(0)

    def _become_rank(self, fields: dict[str, Any], descriptors: list[int]) -> ForkedRank:
        streams: dict[str, int] = fields.pop("streams")
        words: list[str] = fields["words"]
        place = fields.pop("channel", None)
        channel = set() if place is None else {descriptors[place]}
        words += map(str, channel)
        try:
            os.setsid()
            go, told = descriptors[0], moved_up(descriptors[1])
            for number, place in streams.items():
                os.dup2(descriptors[place], int(number))
            self._connection.detach()
            for descriptor in open_descriptors() - self._kept - channel - {go, told}:
                os.close(descriptor)
            order = forked_rank.Order(**fields)
            forked_rank.become(order, script.bootstrap(), self._path)
            from ft_client import bootstrap

            self._wait_to_go(go)
        except BaseException as error:  # the edge of a process; what goes wrong here must not end the training
            print(f"ft_launcher: this rank starts by exec: {type(error).__name__}: {error}", file=sys.stderr)
            with contextlib.suppress(BaseException):
                for descriptor in channel:
                    os.set_inheritable(descriptor, True)
                os.execve(sys.executable, [sys.executable, "-u", script.bootstrap(), *words], fields["environ"])
            os._exit(1)
        first_path = None if is_safe_path() else fields["cwd"] or ""

        def make() -> bootstrap.Rank:
            program = bootstrap.Rank(bootstrap.main_of(words, first_path), bootstrap.prepare())
            start_again.watch(order, told, channel, program.act_on_loaded)
            return program

        return ForkedRank(make)

    def _wait_to_go(self, go: int) -> None:
        """Ends this process if the agent does not want it, or is gone."""
        if os.read(go, 1) != _GO:
            os._exit(0)
        os.close(go)
        end_with_parent(self._agent)


def let_go(writer: int, ranks: int) -> None:
    """Lets so many ranks run their script."""
    os.write(writer, _GO * ranks)


def end_with_parent(parent: int) -> None:
    """SIGKILL for this process when its parent's main thread ends; at once if it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    deadline = time.monotonic() + 1.0  # the process in between may be about to end
    while os.getppid() != parent:
        if os.getppid() == 1 or time.monotonic() > deadline:
            os._exit(0)
        time.sleep(0.0002)


def is_safe_path() -> bool:
    """Whether the interpreter puts no folder of its own choice first into `sys.path`."""
    return bool(sys.flags.isolated or getattr(sys.flags, "safe_path", False))


def _against_this_process() -> str:
    """Why this process cannot be forked into ranks; empty when it can."""
    child = os.fork()  # libraries with a handler for forks (OpenBLAS) end their threads for it
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return warm_start.against_process(threads_here(), sys.modules["torch"].cuda.is_initialized(), _device_files())


def threads_here() -> int:
    """How many threads this process has, those of C libraries too."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 (only counted)


def _device_files() -> list[str]:
    """Files of GPU drivers that this process holds open: a driver that was initialised, by whomever."""
    found = []
    for descriptor in open_descriptors():
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 (it may be no path)
    return [path for path in found if path.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))]


def _answer_of(between: int, reader: int) -> dict[str, Any]:
    with os.fdopen(os.dup(reader), "rb") as pipe:
        text = pipe.read()
    os.waitpid(between, 0)
    answer: dict[str, Any] = json.loads(text) if text else {"error": "the process in between was killed"}
    return answer


def main(path: Sequence[str]) -> ForkedRank:
    """A zygote as a program of its own: imports torch and serves; returns in ranks. The last word says what it gets."""
    order = json.loads(sys.argv[-1])
    connection = socket.socket(fileno=order["connection"])
    if order["path"] is not None:
        sys.path[:] = path = order["path"]
    load_torch()
    return Zygote(connection, order["agent"], path).serve()
