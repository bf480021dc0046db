"""One zygote as its agent has it: forked or started as a program, asked for ranks, buried.

Decides nothing: whether there may be one, and what follows when it is lost, is the pool's.
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

from ft_launcher import zygote
from ft_launcher.forked_rank import ForkedRank
from ft_launcher.process_tree import subreaper
from rank_monitor.contract import env
from rank_monitor.contract.wait import readable

_ANSWER_S = 20.0
_END_S = 1.0
# The root is appended for a tree that is not installed; ranks must not see it.
_START = (
    "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); path = sys.path[:];"
    " sys.path.append({root!r}); from ft_launcher.zygote import main; rank = main(path)\n"
    "with rank: rank.take()()\n"
    "rank.end()"
)


class ZygoteLost(Exception):
    """The zygote cannot be used any more; the text says why."""


class ZygoteUnfit(Exception):
    """What a preloaded module did when it was imported allows no forks; the text says what."""


class NoRanks(Exception):
    """The zygote could not fork what it was asked for; the text says why."""


@dataclass(frozen=True)
class RankOrder:
    """One rank: `[-m] SCRIPT ARGS`, its whole environment, and the descriptors of its streams by number.

    `channel` is one more descriptor, to a rank of a function; its number there becomes the last of the words.
    """

    words: Sequence[str]
    environ: Mapping[str, str]
    streams: Mapping[int, int]
    channel: int | None = None


@dataclass
class ZygoteProcess:
    """A zygote, a child of this process.

    `environ` is what torch was imported with; `ready`: it has imported all it is to; `loaded`: its modules by then, of
    each that is in no package the file.
    """

    pid: int
    pidfd: int
    connection: socket.socket
    environ: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    ready: bool = False
    loaded: Mapping[str, str | None] = field(default_factory=dict)

    @classmethod
    def fork(cls, path: Sequence[str], unwanted: Collection[int]) -> ZygoteProcess | ForkedRank:
        """This process forks: everything it has loaded is shared. Arguments as of `zygote.Zygote`.

        Returns:
            In each rank of the zygote: that rank.

        Raises:
            OSError: the system refuses.
        """
        ours, theirs = socket.socketpair()
        agent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            ours.close()
            return zygote.Zygote(theirs, agent, path).serve(unwanted)
        theirs.close()
        return cls(pid, os.pidfd_open(pid), ours, dict(os.environ))

    @classmethod
    def spawn(cls, tag: str, path: Sequence[str] | None = None) -> ZygoteProcess:
        """Starts one as a program. `path`: its `sys.path`; None: Python's own.

        Raises:
            OSError: the system refuses.
        """
        root = str(Path(__file__).resolve().parents[1])
        ours, theirs = socket.socketpair()
        order = {"connection": theirs.fileno(), "agent": os.getpid(), "path": path}
        environ = dict(os.environ)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _START.format(root=root), json.dumps(order)],
                env={**environ, env.JOB_TAG: tag},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        from ft_launcher import descriptor_limit  # here: a fork has no more modules than its script imports

        descriptor_limit.give_back(process.pid)  # long before it is asked for a rank
        return cls(process.pid, os.pidfd_open(process.pid), ours, environ, process)

    def prepare(self, tag: str, preload: Sequence[str]) -> None:
        """Has it import the user's modules; it is ready some time later.

        Raises:
            ZygoteLost: it is gone.
        """
        try:
            zygote.send(self.connection, {"tag": tag, "preload": list(preload)})
        except OSError:
            raise ZygoteLost("it ended") from None

    def descriptors(self) -> set[int]:
        """Readable when `ended` or `ready` may have changed."""
        return {self.pidfd} | (set() if self.ready else {self.connection.fileno()})

    def ended(self, within_s: float = 0.0) -> bool:
        """Whether it is gone, or goes within so many seconds."""
        return bool(readable([self.pidfd], within_s))

    def await_ready(self, timeout_s: float | None) -> bool:
        """Whether it said that it is ready, or says so in time; None: without limit.

        Raises:
            PreloadError: a module of the user's cannot be imported.
            ZygoteUnfit: it must not be forked.
            ZygoteLost: it said something else, or nothing any more.
        """
        if self.ready or not readable([self.connection.fileno()], timeout_s):
            return self.ready
        answer: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            answer, _ = zygote.receive(self.connection) or ({}, [])
        if "module" in answer:
            raise zygote.PreloadError(answer["module"], answer["problem"])
        if "unfit" in answer:
            raise ZygoteUnfit(answer["unfit"])
        if "loaded" not in answer:
            raise ZygoteLost("it ended" if self.ended(0.1) else "it does not speak")
        self.loaded = answer["loaded"]
        self.ready = True
        return True

    def start_ranks(self, orders: Sequence[RankOrder], told: int) -> list[int]:
        """Pids of new ranks, children of this process, that run from now on.

        Args:
            told: the descriptor to which a rank writes a line when it would better have been started by exec.

        Raises:
            ZygoteLost: no answer came.
            NoRanks: the system refuses.
        """
        reader, writer = os.pipe()
        try:
            pids: list[int] = []
            for first in range(0, len(orders), zygote.MAX_RANKS):
                pids += self._ask(orders[first : first + zygote.MAX_RANKS], reader, told)
            zygote.let_go(writer, len(pids))
            return pids
        finally:  # ranks that were not let go see this end closed, and end
            os.close(reader)
            os.close(writer)

    def _ask(self, orders: Sequence[RankOrder], go: int, told: int) -> list[int]:
        descriptors, ranks = [go, told], []
        for order in orders:
            streams = {}
            for number, descriptor in order.streams.items():
                streams[number] = len(descriptors)
                descriptors.append(descriptor)
            rank = {"words": list(order.words), "environ": dict(order.environ), "streams": streams}
            ranks.append(rank | ({} if order.channel is None else {"channel": len(descriptors)}))
            descriptors += [] if order.channel is None else [order.channel]
        try:
            self.connection.settimeout(_ANSWER_S)
            surroundings = _surroundings()
            with subreaper():  # a user's program is none at other times; from before the first rank can be an orphan
                zygote.send(self.connection, {"all": surroundings, "ranks": ranks}, descriptors)
                taken = zygote.receive(self.connection)
        except (OSError, ValueError) as error:
            raise ZygoteLost("it ended" if self.ended(0.1) else f"it gave no answer ({error})") from None
        if taken is None:
            raise ZygoteLost("it ended" if self.ended(0.1) else "it does not speak")
        answer, _ = taken
        if "error" in answer:
            raise NoRanks(answer["error"])
        pids: list[int] = answer["pids"]
        return pids

    def bury(self) -> int:
        """Ends it, at once if it does not go; returns its exit code. Ranks that run go on."""
        with contextlib.suppress(OSError):
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
            return os.waitstatus_to_exitcode(status) if pid else 0
        return 0


def _surroundings() -> dict[str, Any]:
    """What a rank has from the process that starts it."""
    try:
        cwd = os.getcwd()  # noqa: PTH109 (what a rank gets is text)
    except OSError:
        cwd = None
    umask = os.umask(0o077)
    os.umask(umask)
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    kept = [int(number) for number in ignored if number not in (signal.SIGPIPE, signal.SIGXFSZ)]
    return {"cwd": cwd, "umask": umask, "affinity": sorted(os.sched_getaffinity(0)), "ignored": kept}
