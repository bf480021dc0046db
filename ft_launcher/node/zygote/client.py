"""The agent's end of one zygote: forks it or starts it as a program, asks it for ranks, ends it.

Called by `pool.py`, which decides whether there may be a zygote and what follows when it is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ft_launcher
from ft_launcher.node.processes.process_tree import subreaper
from ft_launcher.node.zygote import fork_server
from ft_launcher.node.zygote.forked_rank import ForkedRank
from ft_launcher.node.zygote.learned_modules import Surroundings
from rank_monitor.contract import env
from rank_monitor.contract.processes.fork import fork
from rank_monitor.contract.processes.wait import readable

# Seconds for one request. Forks take milliseconds: a zygote without an answer in this time is stuck or stopped.
_ANSWER_S = 20.0
# Seconds, for a process that only has to read the end of its connection.
_END_S = 1.0
# The root is appended for a tree that is not installed; ranks must not see it.
_START = (
    "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); path = sys.path[:];"
    " sys.path.append({root!r}); from ft_launcher.node.zygote.fork_server import main; rank = main(path)\n"
    "with rank: rank.prepare_program()()\n"
    "rank.end()"
)


class ZygoteLost(Exception):
    """The zygote cannot be used any more; the text says why."""


class ZygoteUnfit(Exception):
    """A preloaded module made the process unfit to be forked, by a thread or CUDA for example; the text says how."""


class NoRanks(Exception):
    """The zygote could not fork what it was asked for; the text says why."""


@dataclass(frozen=True)
class RankOrder:
    """What starts one rank: `[-m] SCRIPT ARGS`, its whole environment, and descriptors of its streams by number.

    `channel`: a further descriptor for a rank of a function; its number in the rank becomes the last of `arguments`.
    `tells_modules`: it is to send which modules its program has imported.
    """

    arguments: Sequence[str]
    environ: Mapping[str, str]
    streams: Mapping[int, int]
    channel: int | None = None
    tells_modules: bool = False


@dataclass
class ZygoteProcess:
    """A zygote, a child of this process.

    `environ`: the environment in which torch was imported. `ready`: all its imports are done. `loaded`: its top-level
    modules by then, each with its file. `learned`: of one that another one forked, what `module_trial.learn` returned.
    """

    pid: int
    pidfd: int
    connection: socket.socket
    environ: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    ready: bool = False
    loaded: Mapping[str, str | None] = field(default_factory=dict)
    learned: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def fork(cls, path: Sequence[str], unwanted: Collection[int]) -> ZygoteProcess | ForkedRank:
        """Forks this process: all that it has loaded is shared. Arguments as of `fork_server.Zygote`.

        Returns:
            In each rank of the zygote: that rank.

        Raises:
            OSError: the system refuses.
        """
        ours, theirs = socket.socketpair()
        # Asked before the fork: the zygote compares its parent with this, in case the agent has ended by then.
        agent = os.getpid()
        try:
            pid = fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            ours.close()
            return fork_server.Zygote(theirs, agent, path).serve(unwanted)
        theirs.close()
        return cls(pid, os.pidfd_open(pid), ours, dict(os.environ))

    @classmethod
    def spawn(cls, tag: str, path: Sequence[str] | None = None) -> ZygoteProcess:
        """Starts a zygote as a program. `path`: its `sys.path`; None: Python's own.

        Raises:
            OSError: the system refuses.
        """
        from ft_launcher.node.processes import (
            descriptor_limit,  # here: a fork has no more modules than its script imports
        )

        root = str(Path(ft_launcher.__file__).resolve().parents[1])
        ours, theirs = socket.socketpair()
        order = {"connection": theirs.fileno(), "agent": os.getpid(), "path": path}
        environ = dict(os.environ)
        try:
            with descriptor_limit.of_user() as give_back:
                process = subprocess.Popen(
                    [sys.executable, "-c", _START.format(root=root), json.dumps(order)],
                    env={**environ, env.JOB_TAG: tag},
                    pass_fds=[theirs.fileno()],
                    # Ctrl-C at the terminal goes to the launcher alone.
                    start_new_session=True,
                )
                give_back(process.pid)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process.pid, os.pidfd_open(process.pid), ours, environ, process)

    def prepare(self, tag: str, preload: Sequence[str]) -> None:
        """Has it import the user's modules. Returns at once; `await_ready` waits.

        Raises:
            ZygoteLost: it is gone.
        """
        try:
            fork_server.send(self.connection, {"tag": tag, "preload": list(preload)})
        except OSError:
            raise ZygoteLost("it ended") from None

    def descriptors(self) -> set[int]:
        """Readable when `ended` or `ready` may have changed."""
        if self.ready:
            return {self.pidfd}
        return {self.pidfd, self.connection.fileno()}

    def ended(self, within_s: float = 0.0) -> bool:
        """Whether it has ended, or ends within `within_s` seconds."""
        return bool(readable([self.pidfd], within_s))

    def await_ready(self, timeout_s: float | None) -> bool:
        """Waits until it is ready, at most `timeout_s` (None: no limit); returns whether it is.

        Raises:
            PreloadError: a module of the user's cannot be imported.
            ZygoteUnfit: it must not be forked.
            ZygoteLost: it ended, or its answer cannot be read.
        """
        if self.ready or not readable([self.connection.fileno()], timeout_s):
            return self.ready
        answer: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            answer, _ = fork_server.receive(self.connection) or ({}, [])
        if "module" in answer:
            raise fork_server.PreloadError(answer["module"], answer["problem"])
        if "unfit" in answer:
            raise ZygoteUnfit(answer["unfit"])
        if "loaded" not in answer:
            raise self._lost("it does not speak")
        self.loaded = answer["loaded"]
        self.learned = answer.get("learned", {})
        self.ready = True
        return True

    def _lost(self, if_alive: str) -> ZygoteLost:
        """Returns the error of a zygote that gave no answer; `if_alive`: the reason unless it has ended."""
        if self.ended(0.1):
            return ZygoteLost("it ended")
        return ZygoteLost(if_alive)

    def start_ranks(self, orders: Sequence[RankOrder], report_to: int) -> list[int]:
        """Starts ranks; returns their pids, children of this process. They run from now on.

        Args:
            report_to: descriptor to which a rank writes a line if it has to start again by exec.

        Raises:
            ZygoteLost: no answer arrived in time.
            NoRanks: the system refuses.
        """
        reader, writer = os.pipe()
        try:
            pids: list[int] = []
            # All ranks are forked before the first one may run: a failed request leaves none that runs.
            for first in range(0, len(orders), fork_server.MAX_RANKS):
                pids += self._ask(orders[first : first + fork_server.MAX_RANKS], reader, report_to)
            fork_server.let_go(writer, len(pids))
            return pids
        finally:  # ranks that were not let go see this end closed, and end
            os.close(reader)
            os.close(writer)

    def _ask(self, orders: Sequence[RankOrder], go: int, report_to: int) -> list[int]:
        descriptors, ranks = [go, report_to], []
        for order in orders:
            streams = {}
            for number, descriptor in order.streams.items():
                streams[number] = len(descriptors)
                descriptors.append(descriptor)
            rank: dict[str, Any] = {
                "arguments": list(order.arguments),
                "environ": dict(order.environ),
                "streams": streams,
                "tells_modules": order.tells_modules,
            }
            if order.channel is not None:
                rank["channel"] = len(descriptors)
                descriptors.append(order.channel)
            ranks.append(rank)
        return self._ask_for({"all": _surroundings(), "ranks": ranks}, descriptors)

    def _ask_for(self, request: dict[str, Any], descriptors: Sequence[int]) -> list[int]:
        """Has it fork what the request names; returns the pids of children of this process."""
        try:
            self.connection.settimeout(_ANSWER_S)
            with subreaper():  # a user's program is none at other times; from before the first rank can be an orphan
                fork_server.send(self.connection, request, descriptors)
                taken = fork_server.receive(self.connection)
        except (OSError, ValueError) as error:
            raise self._lost(f"it gave no answer ({error})") from None
        if taken is None:
            raise self._lost("it does not speak")
        answer, _ = taken
        if "error" in answer:
            raise NoRanks(answer["error"])
        pids: list[int] = answer["pids"]
        return pids

    def learn(self, names: Sequence[str], environ: Surroundings) -> ZygoteProcess:
        """Has it fork a zygote that imports more modules; returns that one, which is not ready. This one goes on.

        Args:
            names, environ: as of `learned_modules.choose`.

        Raises:
            ZygoteLost: no answer arrived in time.
            NoRanks: the system refuses.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                request = {
                    "learn": list(names),
                    "differing": sorted(environ.differing),
                    "changed": dict(environ.changed),
                }
                (pid,) = self._ask_for(request, [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ZygoteProcess(pid, os.pidfd_open(pid), ours, self.environ)

    def reap(self) -> int:
        """Ends it, by SIGKILL if it does not end itself; returns its exit code. Running ranks go on."""
        with contextlib.suppress(OSError):
            # The zygote ends when it reads the end of its connection, also where a copy of the descriptor is open.
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        if not self.ready or not self.ended(_END_S):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self.ended(_END_S)
        os.close(self.pidfd)
        if self.process is not None:
            return self.process.poll() or 0
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            return 0
        return 0


def _surroundings() -> dict[str, Any]:
    """Returns what a program inherits from the process that starts it, for ranks that are forks of another one."""
    try:
        cwd = os.getcwd()  # noqa: PTH109 (what a rank gets is text)
    except OSError:
        cwd = None
    # `os` has no call that only reads the umask.
    umask = os.umask(0o077)
    os.umask(umask)
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    # Python ignores these two itself, so that says nothing about who started the launcher.
    kept = [int(number) for number in ignored if number not in (signal.SIGPIPE, signal.SIGXFSZ)]
    return {"cwd": cwd, "umask": umask, "affinity": sorted(os.sched_getaffinity(0)), "ignored": kept}
