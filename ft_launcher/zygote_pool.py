"""The agent's side of the zygote: makes it, asks it for ranks, replaces it when it is lost, and says why ranks exec.

A restart never waits for a zygote: while there is none, ranks start by exec, unless the user insists on a warm start.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_launcher import warm_start, zygote
from ft_launcher.process_tree import is_stopped
from rank_monitor.contract import env
from rank_monitor.contract.config import StartSettings
from rank_monitor.contract.errors import ConfigError, FtError

logger = logging.getLogger(__name__)

AUTO_IS_WARM = True
"""Whether `auto` means a warm start; else only `on` does."""

_ANSWER_S = 20.0
_READY_S = 300.0
_END_S = 1.0
_RESPAWNS = 3
_SLOW_PRELOAD_S = 10.0
# The root is appended for a tree that is not installed; ranks must not see it.
_START = (
    "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); path = sys.path[:];"
    " sys.path.append({root!r}); from ft_launcher.zygote import main; main(path)"
)


class NoWarmStart(FtError):
    """The user insists on a warm start, and there can be none."""


class _Lost(Exception):
    """The zygote cannot be used; the text says why."""


@dataclass(frozen=True)
class RankOrder:
    """One rank: `[-m] SCRIPT ARGS`, its whole environment, and the descriptors of its streams by number."""

    words: Sequence[str]
    environ: Mapping[str, str]
    streams: Mapping[int, int]


@dataclass
class _Zygote:
    pid: int
    pidfd: int
    connection: socket.socket
    environ: Mapping[str, str]
    ready: bool
    process: subprocess.Popen[bytes] | None = None


class ZygotePool:
    """Make it before torch is imported, `prepare` it before anything else starts a thread or touches a GPU."""

    def __init__(self) -> None:
        self._zygote: _Zygote | None = None
        self._settings = StartSettings()
        self._tag = ""
        self._why_not = "no warm start was prepared"
        self._said = ""
        self._look: warm_start.ScriptLook | None = None
        self._respawns = 0
        self._held = zygote.open_descriptors()
        self._first_path = None if zygote.is_safe_path() else sys.path.pop(0)
        self._path = list(sys.path)
        gc.disable()

    def prepare(self, words: Sequence[str], settings: StartSettings, source: str, tag: str) -> None:
        """Imports what ranks share and forks the zygote, where that may be done.

        Args:
            words: `[-m] SCRIPT ARGS` as given; empty when Python does not run them.
            source: where the setting `warm_start` came from.
            tag: the job's mark.

        Raises:
            ConfigError: a module to preload cannot be imported, or the warm start that the user insists on cannot be.
        """
        self._settings, self._tag = settings, tag
        try:
            self._why_not = self._fork(words)
        finally:
            gc.freeze()
            self._restore()
        if self._why_not and settings.warm_start == "on":
            raise ConfigError("warm_start", "on", source, self._why_not, "Use auto: ranks start by exec then")

    def _restore(self) -> None:
        """Gives this process back what was changed while it loaded what ranks share."""
        gc.enable()
        if self._first_path is not None:
            sys.path.insert(0, self._first_path)
            self._first_path = None

    def start_ranks(self, orders: Sequence[RankOrder], numa: bool) -> list[int] | None:
        """Pids of new ranks, children of this process; None: they must start by exec, and a line in the log says why.

        Args:
            numa: whether ranks are bound to processors by numactl.

        Raises:
            NoWarmStart: the user does not want that.
        """
        why = self._why_not or self._against(orders, numa)
        if not why:
            try:
                pids = self._ask(orders)
                self._respawns, self._said = 0, ""
                return pids
            except _Lost as lost:
                why = str(lost)
        if self._settings.warm_start == "on":
            raise NoWarmStart(f"no warm start: {why}. --ft-warm-start=auto starts the ranks by exec instead")
        if why != self._said and (AUTO_IS_WARM or self._settings.warm_start != "auto"):
            self._said = why
            logger.info("Ranks start by exec: %s.", why)
        return None

    def pids(self) -> set[int]:
        """The zygote's pid, while there is one."""
        return {self._zygote.pid} if self._zygote else set()

    def descriptors(self) -> set[int]:
        """Readable when something is to be handled."""
        if self._zygote is None:
            return set()
        return {self._zygote.pidfd} | (set() if self._zygote.ready else {self._zygote.connection.fileno()})

    def handle(self) -> None:
        """Takes note of a zygote that ended, or that is ready now."""
        current = self._zygote
        if current is None:
            return
        if _readable(current.pidfd, 0):
            self._lose(current, "it ended")
        elif not current.ready and _readable(current.connection.fileno(), 0):
            with contextlib.suppress(OSError, ValueError):
                current.ready = zygote.receive(current.connection) is not None
            if current.ready:
                logger.info("The zygote is there again: ranks start warm.")
            else:
                self._lose(current, "it does not speak")

    def close(self) -> None:
        """Ends the zygote; ranks that run go on."""
        self._restore()
        current, self._zygote = self._zygote, None
        self._why_not = self._why_not or "the launcher is ending"
        if current is not None:
            self._bury(current)

    # Making one.

    def _fork(self, words: Sequence[str]) -> str:
        """Forks the zygote; returns why not."""
        wanted = self._settings.warm_start
        if wanted == "off" or (wanted == "auto" and not AUTO_IS_WARM):
            return f"--ft-warm-start={wanted}"
        if why := warm_start.against_command(words, os.environ, sys.orig_argv):
            return why
        self._look = warm_start.ScriptLook(words, self._path)
        if why := self._look.against():
            return why
        began = time.monotonic()
        try:
            zygote.load(self._settings.preload)
        except zygote.PreloadError as error:
            hint = "Name installed modules; files beside the script are not preloaded"
            raise ConfigError("preload", error.module, "--ft-preload", error.problem, hint) from None
        if self._settings.preload and (took := time.monotonic() - began) > _SLOW_PRELOAD_S:
            print(f"ft_launcher: --ft-preload {','.join(self._settings.preload)} took {took:.0f} s", file=sys.stderr)
        return self._fork_here()

    def _fork_here(self) -> str:
        if why := warm_start.against_process(1, _cuda_initialised(), _device_files()):
            return why
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        gc.freeze()
        ours, theirs = socket.socketpair()
        agent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            return f"no zygote can be forked ({error.strerror})"
        if pid == 0:
            zygote.Zygote(theirs, agent, self._tag, self._path).run(self._held | {ours.fileno()})
        theirs.close()
        self._zygote = _Zygote(pid, os.pidfd_open(pid), ours, dict(os.environ), ready=True)
        # Counted after the fork: libraries with a handler for forks (OpenBLAS) have ended their threads for it.
        threads = len(list(Path("/proc/self/task").iterdir()))
        if why := warm_start.against_process(threads, cuda=False, device_files=()):
            self._bury(self._zygote)
            self._zygote = None
        return why

    def _respawn(self) -> None:
        """Starts a zygote by exec, in the background."""
        root = str(Path(__file__).resolve().parents[1])
        ours, theirs = socket.socketpair()
        given = {"connection": theirs.fileno(), "agent": os.getpid(), "tag": self._tag}
        order = {**given, "preload": self._settings.preload}
        environ = dict(os.environ)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _START.format(root=root), json.dumps(order)],
                env={**environ, env.JOB_TAG: self._tag},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            logger.warning("No zygote can be started (%s): ranks start by exec.", error)
            self._why_not = f"no zygote can be started ({error})"
            return
        finally:
            theirs.close()
        self._zygote = _Zygote(process.pid, os.pidfd_open(process.pid), ours, environ, False, process)

    # Losing one.

    def _lose(self, lost: _Zygote, why: str) -> None:
        """Buries a zygote, and starts another unless several were lost in a row."""
        self._zygote = None
        code = self._bury(lost)
        how = f"{why} ({'signal' if code < 0 else 'code'} {abs(code)})" if why == "it ended" else why
        if self._respawns >= _RESPAWNS:
            self._why_not = f"{_RESPAWNS + 1} zygotes were lost in a row; the last: {how}"
            logger.warning("No more zygotes: %s. Ranks start by exec.", self._why_not)
            return
        self._respawns += 1
        logger.warning("The zygote was lost: %s. Another is started; ranks start by exec until it is ready.", how)
        self._respawn()

    def _bury(self, dead: _Zygote) -> int:
        """Ends it, at once if it does not go; returns its exit code."""
        with contextlib.suppress(OSError):
            dead.connection.shutdown(socket.SHUT_RDWR)
        dead.connection.close()
        if not dead.ready or not _readable(dead.pidfd, _END_S):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(dead.pidfd, signal.SIGKILL)
            _readable(dead.pidfd, _END_S)
        os.close(dead.pidfd)
        if dead.process is not None:
            return dead.process.poll() or 0
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(dead.pid, os.WNOHANG)
            return os.waitstatus_to_exitcode(status) if pid else 0
        return 0

    # Asking one.

    def _against(self, orders: Sequence[RankOrder], numa: bool) -> str:
        if numa:
            return "numactl binds the ranks to processors"
        if self._look is not None and (why := self._look.against()):
            return why
        current = self._await_zygote()
        if current is None:
            return self._why_not or "the zygote was lost, and another is not ready yet"
        if is_stopped(current.pid):
            self._lose(current, "it was stopped")
            return "the zygote was stopped"
        return next(filter(None, (warm_start.against_environment(o.environ, current.environ) for o in orders)), "")

    def _await_zygote(self) -> _Zygote | None:
        """The zygote, once it is ready; waits for that only if the user insists."""
        self.handle()
        deadline = time.monotonic() + _READY_S
        while self._settings.warm_start == "on" and self._zygote and not self._zygote.ready:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            _readable(self._zygote.connection.fileno(), left)
            self.handle()
        return self._zygote if self._zygote and self._zygote.ready else None

    def _ask(self, orders: Sequence[RankOrder]) -> list[int]:
        assert self._zygote is not None
        reader, writer = os.pipe()
        try:
            pids: list[int] = []
            for first in range(0, len(orders), zygote.MAX_RANKS):
                pids += self._ask_some(self._zygote, orders[first : first + zygote.MAX_RANKS], reader)
            zygote.let_go(writer, len(pids))
            return pids
        finally:  # ranks that were not let go see this end closed, and end
            os.close(reader)
            os.close(writer)

    def _ask_some(self, current: _Zygote, orders: Sequence[RankOrder], go: int) -> list[int]:
        descriptors, ranks = [go], []
        for order in orders:
            streams = {}
            for number, descriptor in order.streams.items():
                streams[number] = len(descriptors)
                descriptors.append(descriptor)
            ranks.append({"words": list(order.words), "environ": dict(order.environ), "streams": streams})
        try:
            current.connection.settimeout(_ANSWER_S)
            zygote.send(current.connection, {"all": _surroundings(), "ranks": ranks}, descriptors)
            taken = zygote.receive(current.connection)
            if taken is None:
                raise EOFError("it ended")
        except (OSError, EOFError, ValueError) as error:
            self._lose(current, "it ended" if _readable(current.pidfd, 0.1) else f"it gave no answer ({error})")
            raise _Lost("the zygote was lost while it was asked for ranks") from None
        answer, _ = taken
        if "error" in answer:
            raise _Lost(str(answer["error"]))
        pids: list[int] = answer["pids"]
        return pids


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


def _cuda_initialised() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())


def _device_files() -> list[str]:
    """Files of GPU drivers that this process holds open: a driver that was initialised, by whomever."""
    found = []
    for descriptor in zygote.open_descriptors():
        with contextlib.suppress(OSError):
            found.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    return [path for path in found if path.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))]


def _readable(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
