"""The agent's end of one zygote: forks the zygote or starts it as a program, asks it for ranks, ends it.

Called by `pool.py`, on the agent's thread. `pool.py` decides whether there may be a zygote, and what follows when one
is lost. The other end of the connection is `fork_server.py`. Every request has an answer, and the agent waits for it:

    prepare      modules to import        -> loaded | module, problem (an import failed) | unfit (must not be forked)
    start_ranks  orders and descriptors   -> pids | error
    learn        names and a connection   -> pids (of the next zygote, which then answers as after `prepare`) | error

The answer to `prepare` takes seconds. It is awaited by `await_ready`, so that the launcher goes on meanwhile.
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
    """A preloaded module made the process unfit to be forked, for example by a thread or CUDA; the text says how."""


class NoRanks(Exception):
    """The zygote lives, and could not fork what it was asked for; the text says why."""


@dataclass(frozen=True)
class RankOrder:
    """What starts one rank.

    Attributes:
        arguments: `[-m] SCRIPT ARGS`.
        environ: the rank's whole environment.
        streams: number of a standard stream (1 or 2) -> the descriptor that becomes this stream.
        channel: a further descriptor, for a rank whose entry point is a function. Its number in the rank becomes the
            last of the arguments.
    """

    arguments: Sequence[str]
    environ: Mapping[str, str]
    streams: Mapping[int, int]
    channel: int | None = None


@dataclass
class ZygoteProcess:
    """A zygote, which is a child of this process.

    Attributes:
        pid: of the zygote.
        pidfd: readable when the zygote has ended.
        connection: to the zygote, for one request at a time.
        environ: the environment in which the zygote imported torch.
        process: of a zygote that was started as a program; None: it is a fork.
        ready: whether the zygote has answered that all its imports are done.
        loaded: its top-level modules at that moment, each with its file.
        learned: what `module_trial.learn` returned in a zygote that was forked by another zygote; empty for others.
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
        """Forks this process into a zygote: ranks then share all that the process has loaded.

        Args:
            path: `sys.path` of an interpreter that does not know its script yet.
            unwanted: descriptors that the zygote closes at its start.

        Returns:
            Returns more than once. In this process: the zygote. In each rank that the zygote forks later: that rank.

        Raises:
            OSError: the system refuses.
        """
        ours, theirs = socket.socketpair()
        # Read before the fork: the zygote compares its parent's pid with this, in case the agent has ended by then.
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
        """Starts a zygote as a program of its own, which imports torch itself. Returns at once.

        Used where this process cannot be forked: it is a user's program, or its own modules are loaded by now.

        Args:
            tag: the job's tag, for the zygote's environment.
            path: `sys.path` of the zygote; None: Python's own.

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
        """Has the zygote import the user's modules. Returns at once; `await_ready` waits for the end of the imports.

        Raises:
            ZygoteLost: the zygote is gone.
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
        """Returns whether the zygote has ended. Blocks until it does, `within_s` seconds at most."""
        return bool(readable([self.pidfd], within_s))

    def await_ready(self, timeout_s: float | None) -> bool:
        """Waits until the zygote is ready; returns whether it is.

        Args:
            timeout_s: how long to wait (seconds); 0: not at all; None: without limit.

        Raises:
            PreloadError: a module of the user's cannot be imported.
            ZygoteUnfit: the zygote must not be forked.
            ZygoteLost: the zygote ended, or its answer cannot be read.
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
        """Returns the error for a zygote that gave no answer: that it ended, or else `if_alive`.

        A zygote that is about to end has 0.1 s for it: the connection is closed before the process is gone.
        """
        if self.ended(0.1):
            return ZygoteLost("it ended")
        return ZygoteLost(if_alive)

    def start_ranks(self, orders: Sequence[RankOrder], report_to: int, reports_modules: bool) -> list[int]:
        """Starts ranks; returns their pids, in the order of `orders`. They are children of this process, and run now.

        Either all ranks start, or none runs any code of the user's. All are forked before the first one may run, so a
        failed request leaves none that runs.

        Args:
            orders: one for each rank.
            report_to: descriptor of a pipe, to which a rank writes a line if it has to start again by exec.
            reports_modules: whether the first rank is to report which modules its program has imported.

        Raises:
            ZygoteLost: no answer arrived in time.
            NoRanks: the system refuses.
        """
        reader, writer = os.pipe()
        try:
            pids: list[int] = []
            for first in range(0, len(orders), fork_server.MAX_RANKS):
                some = orders[first : first + fork_server.MAX_RANKS]
                pids += self._ask(*_request(some, reader, report_to, reports_modules and first == 0))
            os.write(writer, fork_server.GO * len(pids))
            return pids
        finally:  # ranks that may not run see this end closed, and end
            os.close(reader)
            os.close(writer)

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int]) -> list[int]:
        """Has the zygote fork what the request names; returns the pids, which are children of this process.

        The process that forks them ends at once. The kernel gives its orphans to the next subreaper above: this
        process.
        """
        try:
            self.connection.settimeout(_ANSWER_S)
            # A user's program is a subreaper at no other time. Entered before the first rank can be an orphan.
            with subreaper():
                fork_server.send(self.connection, request, descriptors)
                received = fork_server.receive(self.connection)
        except (OSError, ValueError) as error:
            raise self._lost(f"it gave no answer ({error})") from None
        if received is None:
            raise self._lost("it does not speak")
        answer, _ = received
        if "error" in answer:
            raise NoRanks(answer["error"])
        pids: list[int] = answer["pids"]
        return pids

    def learn(self, names: Sequence[str], environ: Surroundings) -> ZygoteProcess:
        """Has the zygote fork another zygote, which imports more modules; returns the new one, which is not ready yet.

        This zygote goes on serving.

        Args:
            names: modules that a rank has imported; the new zygote decides which of them it imports.
            environ: the variables of ranks, as for `learned_modules.choose`.

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
                (pid,) = self._ask(request, [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ZygoteProcess(pid, os.pidfd_open(pid), ours, self.environ)

    def reap(self) -> int:
        """Ends the zygote, by SIGKILL if it does not end by itself; returns its exit code. Running ranks go on.

        Blocks for 2 s at most. 0 also where another has taken the exit code.
        """
        with contextlib.suppress(OSError):
            # `shutdown`, since `close` has no effect where a copy of the descriptor is open elsewhere.
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


def _request(
    orders: Sequence[RankOrder], go: int, report_to: int, reports_modules: bool
) -> tuple[dict[str, Any], list[int]]:
    """Returns the request for ranks that wait at the pipe `go`, and the descriptors that belong to the request.

    Descriptors travel beside the JSON text (SCM_RIGHTS), so the text names each by its position in the message.
    Arguments as of `ZygoteProcess.start_ranks`.
    """
    descriptors, ranks = [go, report_to], []
    for place, order in enumerate(orders):
        streams = {}
        for number, descriptor in order.streams.items():
            streams[number] = len(descriptors)
            descriptors.append(descriptor)
        rank: dict[str, Any] = {
            "arguments": list(order.arguments),
            "environ": dict(order.environ),
            "streams": streams,
            "reports_modules": reports_modules and place == 0,
        }
        if order.channel is not None:
            rank["channel"] = len(descriptors)
            descriptors.append(order.channel)
        ranks.append(rank)
    return {"all": _surroundings(), "ranks": ranks}, descriptors


def _surroundings() -> dict[str, Any]:
    """Returns what a program inherits from the process that starts it: folder, umask, processors, ignored signals.

    A rank is a fork of the zygote, and would inherit these from the zygote. It must have the launcher's.
    """
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
