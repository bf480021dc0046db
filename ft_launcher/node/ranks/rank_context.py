"""The processes of the ranks of one cycle: torch's `SubprocessContext`, with another start and another stop.

Made by `agent/ranks.py` for each cycle. A rank is a fork of the zygote where there is one, else a program of its own
(by exec). All methods are called on the agent's thread; the log pumps have threads of their own.

Two things of torch's context are not used. It replaces the signal handlers at each start: here handlers belong to
`node/processes/signals.py`. And when a rank fails, it stops the others with a limit of its own: here stops belong to
`node/processes/process_tree.py`. Uses torch's underscored `_start`, `_close`, `_capture_process_failures`,
`_running_local_ranks` and `_numa_options`, and `_popen` of its handler.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from ft_launcher.node.processes import descriptor_limit
from ft_launcher.node.processes.process_tree import start_ticks
from ft_launcher.node.zygote.client import RankOrder
from ft_launcher.node.zygote.pool import ZygotePool
from ft_launcher.record.journal.file_thread import FileThread, NoAnswer
from ft_launcher.record.logs.cycle_files import open_application_log
from ft_launcher.record.logs.log_pump import LogPump, streams_of
from ft_launcher.record.logs.logs import MAX_KEPT
from ft_launcher.record.logs.spool import Spool, SpooledOutput
from ft_launcher.settings import rank_program
from rank_monitor.contract.errors import ConfigError, one_line
from rank_monitor.contract.processes.wait import end_of, readable
from rank_monitor.contract.wire.foreign import read_file
from rank_monitor.contract.wire.messages import RankException

logger = logging.getLogger(__name__)

_LAST_THREADS_S = 1.0
"""Seconds that a close waits for exit codes. A stop is over when the main threads have ended; an exit code exists when
all threads of the process have."""

ERROR_FILES_S = 2.0
"""Seconds that the agent waits for an error file. A slow file server gives it in tenths of a second."""


@dataclass(frozen=True)
class RankExit:
    """The end of a rank.

    Attributes:
        exit_code: as from `subprocess`: negative for a signal.
        at: when the end was seen (monotonic seconds).
    """

    exit_code: int
    at: float


class StartedProcess(Protocol):
    """What torch uses of a rank's process: a part of `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Returns the exit code once the process has ended."""


class ForkedProcess:
    """A rank that the zygote forked, with the part of `subprocess.Popen` that torch uses. It is a child of this
    process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code once the process has ended (minus the signal's number for a signal). Does not block."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@dataclass(frozen=True)
class ForkedHandler:
    """Replaces torch's `SubprocessHandler` for a forked rank, with the attributes that torch reads."""

    proc: StartedProcess
    local_rank_id: int


class _RankHandler(SubprocessHandler):  # type: ignore[misc]
    """torch's handler of a process, with streams that are opened here.

    A rank that is started again must append to the log files of its predecessor. And where stdout and stderr go to one
    file, torch opens that file twice, so that each stream would overwrite the other.

    Args:
        streams: number of a standard stream (1 or 2) -> the open file.
        kwargs: torch's arguments.
    """

    def __init__(self, streams: Mapping[int, IO[str]], **kwargs: Any) -> None:
        self._streams = streams
        super().__init__(stdout=None, stderr=None, **kwargs)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        """torch's hook: starts the process, with the streams of this object. Called by torch's `__init__`."""
        self._stdout, self._stderr = self._streams.get(1), self._streams.get(2)
        process: subprocess.Popen[bytes] = super()._popen(args, env)
        return process


class RankContext(SubprocessContext):  # type: ignore[misc]
    """The processes of the ranks of one cycle on this node.

    Args:
        args, kwargs: torch's arguments.
        zygotes: forks ranks, where it can.
        application_log: the file in which the output of all ranks is merged; None: there is none.
        is_read: whether the launcher reads all that ranks print. `printed_to` then names files for all ranks.

    Attributes:
        pidfds: local rank -> a descriptor that is readable when the rank has ended. Has the ranks whose exit code was
            not taken yet.
        exits: local rank -> its end, once the exit code was taken.
        started_ns: when the start began (monotonic nanoseconds).
        ignored: local ranks whose ends do not count for the result of the cycle.
    """

    _failures: dict[int, ProcessFailure]

    def __init__(
        self,
        *args: Any,
        zygotes: ZygotePool,
        application_log: Path | None = None,
        is_read: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._zygotes = zygotes
        self._is_read = is_read
        self._spooled = SpooledOutput()
        if is_read:
            self._spooled = SpooledOutput.instead_of_console(self.stdouts, self.stderrs)
        self._pump = self._replace_tails()
        self._together: LogPump | None = None
        if application_log is not None:
            self._together = open_application_log(application_log, self.envs, self.stdouts, self.stderrs)
        self.pidfds: dict[int, int] = {}
        self.exits: dict[int, RankExit] = {}
        self.errors: dict[int, tuple[RankException, float | None]] = {}
        """Local rank -> what an ended rank wrote of its error, and when (monotonic seconds). Filled and read by
        `agent/cycle/evidence.py`."""
        self.started_ns = 0
        self.ignored: set[int] = set()
        self.files = FileThread()
        """The thread that reads and renames the ranks' error files. `Ranks.begin` replaces it by that of the run."""
        self.on_reaped: Callable[[int], None] = lambda pid: None
        """Called with the pid of each rank whose exit code was taken. Set by `Ranks.begin`."""
        self._given_up: dict[int, int] = {}
        self._started_again: dict[int, float] = {}
        self._first_failed = -1

    def _replace_tails(self) -> LogPump:
        """Replaces torch's tails of log files, which poll, by one pump. torch's `close` stops it as it would its
        tails."""
        if "_tail_logs" in vars(self):
            pump = LogPump([*streams_of(self.name, vars(self)["_tail_logs"]), *self._spooled.streams])
            self._tail_logs = [pump]
        else:  # before torch 2.10
            tails = [vars(self)["_stdout_tail"], vars(self)["_stderr_tail"]]
            pump = LogPump([*streams_of(self.name, tails), *self._spooled.streams])
            self._stdout_tail = self._stderr_tail = pump
        return pump

    def printed_to(self) -> dict[int, list[str]]:
        """Returns the files that each rank prints to, by local rank."""
        return {
            local_rank: sorted({self.stdouts[local_rank], self.stderrs[local_rank]} - {"", os.devnull})
            for local_rank in range(self.nprocs)
        }

    @property
    def spools(self) -> Mapping[str, Spool]:
        """The files among these that nobody else keeps: path -> the spool that frees what was read."""
        return self._spooled.spools

    @property
    def _binding(self) -> Any:
        """torch's options for binding ranks to processors; None where nothing is bound."""
        return vars(self).get("_numa_options")

    def descriptors(self) -> set[int]:
        """Readable when `poll` has something to do."""
        return set()

    def next_check(self) -> float | None:
        """When `poll` should be called even if nothing is readable (monotonic seconds)."""
        return None

    def poll(self) -> None:
        """Receives what ranks send beside their exit code. Ranks that run a script send nothing."""

    def start(self) -> None:
        """Starts the ranks and the pumps of their output; touches no signal handler. Raises what the start raises."""
        # Read before the start: a message that was sent earlier is from the previous process of the rank.
        self.started_ns = time.monotonic_ns()
        self._start()
        for local_rank, pid in self.pids().items():
            self.pidfds[local_rank] = end_of(pid)
        self._pump.start()
        self._spooled.start()
        if self._together is not None:
            self._together.start()

    def start_again(self, local_rank: int, more: Mapping[str, str]) -> int:
        """Starts one rank again, which has ended, while the others run (in-process restart).

        The output is appended to the files of the previous process, whose error file is renamed.

        Args:
            local_rank: of the rank.
            more: variables to add to its environment.

        Returns:
            The pid of the new process.
        """
        self.envs[local_rank] = {**self.envs[local_rank], **more}
        error_file = Path(self.error_files[local_rank])
        with suppress(OSError):
            previous = error_file.with_name(f"{error_file.name}.{self.pids()[local_rank]}")
            self.files.call(partial(error_file.rename, previous), ERROR_FILES_S)
        self._start_rank_again(local_rank)
        pid: int = self.pids()[local_rank]
        self.pidfds[local_rank] = end_of(pid)
        self._started_again[local_rank] = start_ticks(pid)
        # From here on the rank counts as running; its streams were opened for appending while it had an exit.
        del self.exits[local_rank]
        self.errors.pop(local_rank, None)
        return pid

    def succeeded_since(self, lost: Collection[int]) -> dict[str, float]:
        """Returns `Background.succeeded_since` for a cycle that succeeded. `lost`: local ranks that did not take part
        in the end."""
        since = self._started_again | dict.fromkeys(lost, math.inf)
        return {str(local_rank): ticks for local_rank, ticks in since.items()}

    def ignore(self, local_ranks: Collection[int]) -> None:
        """Leaves the ends of these ranks out of the cycle's result. To be called after all ranks have ended."""
        self.ignored |= set(local_ranks)
        self._running_local_ranks -= self.ignored

    def name_failed(self, first: int, local_ranks: Collection[int]) -> None:
        """Has torch see only the ranks that failed by themselves. To be called after all ranks have ended.

        Args:
            first: the local rank that failed first, which torch is to show as the root cause.
            local_ranks: all that failed by themselves.
        """
        self._first_failed = first
        for local_rank in local_ranks:
            try:
                self.files.call(partial(_set_aside_unreadable, Path(self.error_files[local_rank])), ERROR_FILES_S)
            except NoAnswer:
                # The file's folder does not answer. torch reads no file that is not regular, so this one is skipped.
                self.error_files[local_rank] = os.devnull
        self.ignore(set(range(self.nprocs)) - set(local_ranks))

    def hides_errors(self, local_rank: int) -> bool:
        """Returns whether the stderr of a rank does not reach the console."""
        return self.stderrs[local_rank] not in {"", *self._pump.paths}

    def _capture_process_failures(self, done_local_ranks: set[int]) -> None:
        """torch's hook that reads the error files. Afterwards `first` of `name_failed` is the earliest failure.

        torch shows the failure with the earliest time, in whole seconds; of several, the first one in the mapping.
        """
        super()._capture_process_failures(done_local_ranks)
        first = self._failures.get(self._first_failed)
        if first is not None:
            for failure in self._failures.values():
                failure.timestamp = max(failure.timestamp, first.timestamp)
            self._failures = {self._first_failed: first, **self._failures}

    def _start(self) -> None:
        """torch's hook. Fills `subprocess_handlers`: by forks of the zygote, else by programs.

        Raises:
            ConfigError: torch cannot bind the ranks to processors (`--numa-binding`).
        """
        if self._fork(range(self.nprocs)):
            return
        # This logger writes the traceback of an error that is one line of ours.
        binding = logging.getLogger("torch.numa.binding")
        numa = self._binding
        muted, binding.disabled = binding.disabled, numa is not None
        try:
            for local_rank in range(self.nprocs):
                self.subprocess_handlers[local_rank] = self._execute(local_rank)
        except (AssertionError, RuntimeError, ValueError) as error:
            if numa is None:
                raise
            mode, reason = numa.affinity_mode.value, one_line(error)
            hint = "Leave it out where ranks have no GPU"
            raise ConfigError("numa_binding", mode, "--numa-binding", f"torch cannot bind: {reason}", hint) from None
        finally:
            binding.disabled = muted

    def _start_rank_again(self, local_rank: int) -> None:
        """Starts one rank again and replaces its handler."""
        if not self._fork([local_rank]):
            self.subprocess_handlers[local_rank] = self._execute(local_rank)

    def _execute(self, local_rank: int) -> _RankHandler:
        """Starts one rank as a program; returns its handler."""
        # torch's handler requires the argument from torch 2.9 on, and has none before.
        binding: dict[str, Any] = {}
        if "_numa_options" in vars(self):
            binding["numa_options"] = self._binding
        with ExitStack() as files:
            streams = self._open_streams(local_rank, files)
            with descriptor_limit.of_user() as give_back:
                handler = _RankHandler(
                    streams,
                    entrypoint=self.entrypoint,
                    args=self.args[local_rank],
                    env=self.envs[local_rank],
                    local_rank_id=local_rank,
                    **binding,
                )
                give_back(handler.proc.pid)
        return handler

    def _fork(self, local_ranks: Iterable[int]) -> bool:
        """Has the zygote fork ranks; returns whether it did. If not, they must be started as programs."""
        with ExitStack() as files:
            streams = {rank: self._open_streams(rank, files) for rank in local_ranks}
            orders = [self._order(rank, opened) for rank, opened in streams.items()]
            pids = self._zygotes.start_ranks(orders, numa=self._binding is not None)
            if pids is None:
                return False
        for rank, pid in zip(streams, pids, strict=True):
            self.subprocess_handlers[rank] = ForkedHandler(ForkedProcess(pid), rank)
        return True

    def _open_streams(self, local_rank: int, files: ExitStack) -> dict[int, IO[str]]:
        """Opens the files that a rank prints to: number of the stream -> file.

        The files are closed with `files`, as soon as the rank has them: at the end of the cycle the file system may not
        answer, and closing a file may wait for it.
        """
        paths = {1: self.stdouts[local_rank], 2: self.stderrs[local_rank]}
        if local_rank in self.exits or self._spooled.of(local_rank):
            # Started again in this cycle, or both streams go to one file.
            mode = "a"
        else:
            mode = "w"
        return {number: files.enter_context(open(path, mode)) for number, path in paths.items() if path}  # noqa: PTH123

    def _order(self, local_rank: int, streams: Mapping[int, IO[str]]) -> RankOrder:
        """Returns the zygote's order for one rank. The zygote runs the bootstrap itself, so only what follows is in
        it."""
        arguments = [str(argument) for argument in self.args[local_rank]]
        return RankOrder(
            arguments[arguments.index(rank_program.bootstrap()) + 1 :] if rank_program.bootstrap() in arguments else [],
            {**os.environ, **self.envs[local_rank]},
            {number: file.fileno() for number, file in streams.items()},
        )

    def give_up(self, local_rank: int, exit_code: int) -> None:
        """Kills a rank whose program has ended with an error and whose process does not end.

        Args:
            local_rank: of the rank.
            exit_code: the code that counts as the rank's, in place of that of SIGKILL.
        """
        self._given_up[local_rank] = exit_code
        with suppress(OSError):
            signal.pidfd_send_signal(self.pidfds[local_rank], signal.SIGKILL)

    def reap(self, local_rank: int) -> RankExit | None:
        """Takes the exit code of a rank; returns its end; None: it runs, or has no exit code yet. Does not block."""
        if local_rank not in self.exits:
            process = self.subprocess_handlers[local_rank].proc
            exit_code = process.poll()
            if exit_code is None:
                return None
            given_up = self._given_up.pop(local_rank, None)
            if given_up is not None:
                # torch reads the exit code from the process object.
                exit_code = process.returncode = given_up
            self.exits[local_rank] = RankExit(exit_code, time.monotonic())
            os.close(self.pidfds.pop(local_rank))
            self.on_reaped(process.pid)
        return self.exits[local_rank]

    def reap_all(self) -> None:
        """Takes the exit codes of all ranks that ended. Does not block."""
        for local_rank in range(self.nprocs):
            self.reap(local_rank)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """torch's hook to stop the ranks. They have been stopped by then, so only the exit codes are taken."""
        deadline = time.monotonic() + _LAST_THREADS_S
        for pidfd in list(self.pidfds.values()):
            readable([pidfd], max(0.0, deadline - time.monotonic()))
        self.reap_all()
        if self._together is not None:
            self._together.stop()

    def close(self, *args: Any, **kwargs: Any) -> None:
        """Closes the context, and stops the copying of what ranks print."""
        super().close(*args, **kwargs)
        self._spooled.close()


def _set_aside_unreadable(error_file: Path) -> None:
    """Renames an error file that torch cannot read, since its rank was killed while it wrote: torch would raise, and
    end the launcher. Runs in the thread of files."""
    try:
        if os.path.lexists(error_file):
            # Bounded, and a FIFO is refused: torch would open it and block.
            read_file(error_file, MAX_KEPT)
            # As torch reads the file later. An error there would end the launcher.
            ProcessFailure(local_rank=0, pid=0, exitcode=1, error_file=str(error_file))
    except Exception as problem:
        logger.warning("the error file %s is unreadable: %s: %s", error_file, type(problem).__name__, problem)
        with suppress(OSError):
            error_file.rename(error_file.with_name(f"{error_file.name}.unreadable"))
