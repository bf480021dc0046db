"""The zygote: a process that has imported torch and forks into ranks when the agent asks.

It has one thread, never touches a GPU, and ends with the agent. Ranks become the agent's children: a process in between
forks them all and ends. They do nothing of the user's before the agent has their pids and lets them go.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NoReturn

from ft_launcher import forked_rank, proc_view, script
from rank_monitor.contract import env
from rank_monitor.contract.errors import FtError

_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("!I")
_MAX_DESCRIPTORS = 250  # the kernel's limit per message is 253
MAX_RANKS = (_MAX_DESCRIPTORS - 1) // 3
"""Ranks of one request."""
_GO = b"g"
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGTTIN", "SIGTTOU")


class PreloadError(FtError):
    """A module that the user wants to be imported before the ranks fork cannot be."""

    def __init__(self, module: str, problem: str) -> None:
        super().__init__(f"{module}: {problem}")
        self.module, self.problem = module, problem


def load(modules: Iterable[str]) -> None:
    """Imports what all ranks share.

    Raises:
        PreloadError: one of the user's modules cannot be imported.
    """
    importlib.import_module("torch.distributed")
    for module in modules:
        try:
            importlib.import_module(module)
        except KeyboardInterrupt:
            raise
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
        tag: the job's mark, in the environment that /proc shows.
        path: `sys.path` of an interpreter that does not know its script yet.
    """

    def __init__(self, connection: socket.socket, agent: int, tag: str, path: Sequence[str]) -> None:
        self._connection, self._agent, self._tag, self._path = connection, agent, tag, path
        self._kept: set[int] = set()

    def run(self, unwanted: Collection[int] = ()) -> NoReturn:
        """Serves until the agent is gone.

        Args:
            unwanted: descriptors that the agent had open before it loaded what ranks share.
        """
        try:
            self._settle(unwanted)
            while (taken := receive(self._connection)) is not None:
                send(self._connection, self._start_ranks(*taken))
        except OSError:
            pass
        finally:  # whatever it was: the stack below is the agent's
            os._exit(0)

    def _settle(self, unwanted: Collection[int]) -> None:
        end_with_parent(self._agent)
        with contextlib.suppress(PermissionError):  # a new process leads a session already
            os.setsid()
        for name in _IGNORED:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        for descriptor in set(unwanted) - {self._connection.fileno()}:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._kept = open_descriptors() - {self._connection.fileno()}
        proc_view.show(["ft_zygote"], {**os.environ, env.JOB_TAG: self._tag})
        proc_view.name("ft_zygote")
        from ft_client import bootstrap  # here: it is not the agent's to know

        bootstrap.load()
        forked_rank.mark_preloaded()

    def _start_ranks(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Forks what is asked for; returns pids, or what went wrong."""
        reader, writer = os.pipe()
        try:
            between = os.fork()
            if between == 0:
                os.close(reader)
                self._fork_ranks(request, descriptors, writer)
            os.close(writer)
            writer = -1
            with os.fdopen(os.dup(reader), "rb") as pipe:
                text = pipe.read()
            os.waitpid(between, 0)
            answer: dict[str, Any] = json.loads(text) if text else {"error": "the process in between was killed"}
        except OSError as error:
            answer = {"error": f"{error.strerror} when forking"}
        finally:
            for descriptor in {reader, writer, *descriptors} - {-1}:
                os.close(descriptor)
        return answer

    def _fork_ranks(self, request: dict[str, Any], descriptors: list[int], writer: int) -> NoReturn:
        """In the process in between. Ranks that a failure leaves behind end when nobody lets them go."""
        answer: dict[str, Any] = {"pids": []}
        try:
            for rank in request["ranks"]:
                pid = os.fork()
                if pid == 0:
                    self._become_rank({**request["all"], **rank}, descriptors)
                answer["pids"].append(pid)
        except OSError as error:
            answer = {"error": f"{error.strerror} when forking"}
        finally:
            with contextlib.suppress(OSError):
                os.write(writer, json.dumps(answer).encode())
            os._exit(0)

    def _become_rank(self, order: dict[str, Any], descriptors: list[int]) -> NoReturn:
        streams: dict[str, int] = order.pop("streams")
        words: list[str] = order["words"]
        place = order.pop("channel", None)
        channel = set() if place is None else {descriptors[place]}
        words += map(str, channel)
        try:
            os.setsid()
            go = descriptors[0]
            for number, place in streams.items():
                os.dup2(descriptors[place], int(number))
            for descriptor in open_descriptors() - self._kept - channel - {go}:
                os.close(descriptor)
            forked_rank.become(forked_rank.Order(**order), script.bootstrap(), self._path)
            from ft_client import bootstrap

            self._wait_to_go(go)
        except BaseException as error:  # the edge of a process; what goes wrong here must not end the training
            print(f"ft_launcher: this rank starts by exec: {type(error).__name__}: {error}", file=sys.stderr)
            with contextlib.suppress(BaseException):
                for descriptor in channel:
                    os.set_inheritable(descriptor, True)
                os.execve(sys.executable, [sys.executable, "-u", script.bootstrap(), *words], order["environ"])
            os._exit(1)
        try:
            first_path = None if is_safe_path() else order["cwd"] or ""
            forked_rank.run(lambda: bootstrap.run(words, first_path, bootstrap.prepare()))
        finally:
            os._exit(1)

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


def main(path: Sequence[str]) -> NoReturn:
    """A zygote as a program of its own: imports, says that it is ready, and serves. The last word says what it gets."""
    order = json.loads(sys.argv[-1])
    connection = socket.socket(fileno=order["connection"])
    if order["path"] is not None:
        sys.path[:] = path = order["path"]
    load(order["preload"])
    send(connection, {"ready": True})
    Zygote(connection, order["agent"], order["tag"], path).run()
