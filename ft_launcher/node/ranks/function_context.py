"""The ranks of one cycle whose entry point is a function (`launch()`): `RankContext` with return values.

Each rank has a channel to the launcher, a pair of sockets. By `spawn` the function is sent on it, and in all cases the
rank sends its return value on it, then ends. Two ends differ from those of a program:
- A rank that has returned and does not end within `--workers-stop-timeout` is killed, and has succeeded.
- A rank that ends without having returned has failed, whatever its exit code.

There are three ways to start such a rank, by `start_method`:

    spawn        a fork of the zygote, or a new interpreter where there is no zygote. The function is pickled and sent
                 on the channel before the rank starts, and the rank reads it first.
    fork         a fork of this process, by multiprocessing. The function needs no pickling, and the ranks have the
                 objects of this process.
    forkserver   a fork of Python's own fork server, by multiprocessing.

The agent's loop watches the channels (`descriptors`), receives values as they arrive (`poll`), and knows by a rank's
pidfd when its process has ended. torch's result of the cycle gets the values in the end (`_poll`).

All methods are called on the agent's thread. None blocks, but for the start of the ranks and for a moment in which
multiprocessing's fork server passes on an exit code.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from multiprocessing import get_context, spawn
from typing import Any, TypeAlias

from torch.distributed.elastic.multiprocessing.api import RunProcsResult

from ft_launcher.node.processes import descriptor_limit
from ft_launcher.node.ranks import function_rank, nccl
from ft_launcher.node.ranks.rank_context import ForkedHandler, ForkedProcess, RankContext
from ft_launcher.node.zygote.client import RankOrder
from ft_launcher.settings import rank_program
from rank_monitor.contract.errors import FtError
from rank_monitor.contract.processes.wait import end_of, readable
from rank_monitor.contract.wire import sealed_pickle

logger = logging.getLogger(__name__)

_Pair: TypeAlias = "tuple[socket.socket, socket.socket]"

_FUNCTION = "--function"
"""The argument by which the client's bootstrap knows that it has to receive a function."""
_STATUS_S = 2.0
"""Seconds that multiprocessing's fork server has to pass on an exit code. The process itself has ended by then."""


class FunctionProcess:
    """The process of a rank: the part of `subprocess.Popen` that torch uses, and the return value of its function.

    torch's context asks `poll` for the exit code, as it does with a process of its own.

    Args:
        pid: of the rank.
        poll: called after the process has ended; returns the exit code. None: somebody else has taken it.
        channel: the socket on which the value arrives. Not blocking.
        close: releases what multiprocessing holds of the process.

    Attributes:
        returncode: the exit code that counts, once the process has ended.
        returned_at: when the return value arrived (monotonic seconds); None: it has not.
        given_up: whether this launcher has killed the process.
        value: the pickled return value.
    """

    def __init__(
        self, pid: int, poll: Callable[[], int | None], channel: socket.socket, close: Callable[[], None]
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.returned_at: float | None = None
        self.given_up = False
        self.value: bytes | None = None
        self._poll, self._channel, self._close = poll, channel, close
        # The process may have called its function and ended by now, and the fork server may have taken the exit code.
        self._pidfd = end_of(pid)

    def fileno(self) -> int:
        """Returns the channel's descriptor, readable when the value has arrived or no longer can; -1: it is closed."""
        return self._channel.fileno()

    def receive(self) -> None:
        """Receives the return value if it has arrived, and closes the channel then. Does not block."""
        if self._channel.fileno() < 0:
            return
        try:
            self.value = sealed_pickle.receive(self._channel)
        except BlockingIOError:
            return
        except OSError as error:
            logger.warning("what a function returned in process %d cannot be taken: %s", self.pid, error)
        self._channel.close()
        if self.value is not None:
            self.returned_at = time.monotonic()

    def poll(self) -> int | None:
        """Returns the exit code that counts; None: the process runs. Does not block, but for `poll` of the arguments.

        | function     | exit code                  | returned here |
        |--------------|----------------------------|---------------|
        | has returned | 0, unknown, or our SIGKILL | 0             |
        | has not      | 0, or unknown              | 1             |
        | any          | any other                  | the same      |
        """
        if self.returncode is None and readable([self._pidfd], 0.0):
            try:
                code = self._poll()
            except ChildProcessError:
                code = None
            self.receive()
            # The value was sent before the end, so it is there now or never.
            returned = self.value is not None
            if code is None:
                logger.warning("somebody else took the exit code of process %d", self.pid)
            if code == 0 and not returned:
                logger.error("process %d ended before its function returned", self.pid)
            # Our own SIGKILL after the return is a success; an exit with 0 without a value is none.
            if not code or (returned and self.given_up):
                self.returncode = int(not returned)
            else:
                self.returncode = code
            os.close(self._pidfd)
        return self.returncode

    def give_up(self) -> None:
        """Kills the process. Called when its function has returned and it does not end, or a start has failed."""
        self.given_up = True
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Closes the channel. If the process has ended, releases what multiprocessing holds of it."""
        self._channel.close()
        if self.returncode is not None:
            self._close()


class FunctionContext(RankContext):
    """The ranks of one cycle, which call a function.

    Args:
        args, kwargs: of `RankContext`.
        start_method: "spawn" (a fork of the zygote where there is one), "fork" or "forkserver".
        stop_timeout_s: how long a rank may run after its function has returned (seconds).
    """

    def __init__(self, *args: Any, start_method: str, stop_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._start_method, self._stop_timeout_s = start_method, stop_timeout_s
        self._processes: dict[int, FunctionProcess] = {}

    def descriptors(self) -> set[int]:
        """Returns the channels of ranks that have not returned yet; one is readable when `poll` has something to do."""
        numbers = (process.fileno() for process in self._processes.values())
        return {number for number in numbers if number >= 0}

    def next_check(self) -> float | None:
        """Returns when `poll` should be called even if nothing is readable: when a rank that has returned should have
        ended (monotonic seconds); None: no rank has returned and still runs."""
        return min((end for _, end in self._ends()), default=None)

    def poll(self) -> None:
        """Receives return values, and kills ranks that still run `stop_timeout_s` after their function returned."""
        for process in self._processes.values():
            process.receive()
        now = time.monotonic()
        for local_rank, end in self._ends():
            if now >= end:
                text = "local rank %d has returned and does not end: it is stopped after %g s, and has succeeded"
                logger.warning(text, local_rank, self._stop_timeout_s)
                self._processes[local_rank].give_up()

    def _ends(self) -> list[tuple[int, float]]:
        """Returns (local rank, deadline in monotonic seconds) of ranks whose function has returned and that still
        run."""
        return [
            (local_rank, process.returned_at + self._stop_timeout_s)
            for local_rank, process in self._processes.items()
            if process.returned_at is not None and local_rank in self.pidfds and not process.given_up
        ]

    def _start(self) -> None:
        """torch's hook: starts all ranks of the cycle."""
        self._begin(range(self.nprocs))

    def _start_rank_again(self, local_rank: int) -> None:
        """The hook of `RankContext` for an in-process restart: starts one rank again, with a channel of its own."""
        before = self._processes[local_rank]
        self._begin([local_rank])
        before.close()

    def _begin(self, local_ranks: Iterable[int]) -> None:
        """Makes the channels of these ranks, and starts the ranks. If one cannot be started, ends the others."""
        if self._start_method == "spawn":
            start = self._spawn
        else:
            start = self._copy
        with ExitStack() as rank_ends:
            # Packets keep the bounds of messages, and descriptors arrive with their own.
            pairs = {rank: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for rank in local_ranks}
            for ours, theirs in pairs.values():
                ours.setblocking(False)
                rank_ends.enter_context(theirs)
            try:
                start(pairs)
            except BaseException:
                # Ends the ranks that were started: until a copy of this process has its own environment, no stop would
                # find it by the job's tag.
                for local_rank in pairs:
                    process = self._processes.get(local_rank)
                    if process is not None and process.poll() is None:
                        process.give_up()
                for ours, _ in pairs.values():
                    ours.close()
                raise

    def _add(
        self,
        local_rank: int,
        pair: _Pair,
        pid: int,
        poll: Callable[[], int | None],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Adds a rank that was started. `pair`: its channel, this process' end first; `poll`, `close`: as of
        `FunctionProcess`."""
        process = self._processes[local_rank] = FunctionProcess(pid, poll=poll, channel=pair[0], close=close)
        self.subprocess_handlers[local_rank] = ForkedHandler(process, local_rank)

    def _function(self, local_rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns what a rank calls, and the arguments. The function is bound to NUMA nodes where the user asks for
        that."""
        bound = function_rank.bound(self.entrypoint.function, local_rank, self._binding)
        return bound, tuple(self.args[local_rank])

    def _spawn(self, pairs: Mapping[int, _Pair]) -> None:
        """Starts ranks as forks of the zygote, or else each in a new interpreter. Both read their function first."""
        for local_rank, (ours, _) in pairs.items():
            function_rank.send(ours, *self._function(local_rank))
        with ExitStack() as files:
            orders = [
                RankOrder(
                    [_FUNCTION],
                    {**os.environ, **self.envs[local_rank]},
                    {number: file.fileno() for number, file in self._open_streams(local_rank, files).items()},
                    channel=theirs.fileno(),
                )
                for local_rank, (_, theirs) in pairs.items()
            ]
            pids = self._zygotes.start_ranks(orders, numa=False)
            for number, (local_rank, pair) in enumerate(pairs.items()):
                if pids is not None:
                    self._add(local_rank, pair, pids[number], ForkedProcess(pids[number]).poll)
                    continue
                process = _execute(orders[number])
                self._add(local_rank, pair, process.pid, process.poll)

    def _copy(self, pairs: Mapping[int, _Pair]) -> None:
        """Starts ranks by multiprocessing, as forks of this process or of Python's fork server."""
        held: Collection[int] | None = None
        if self._start_method == "fork":
            held = self._zygotes.held
        context: Any = get_context(self._start_method)
        for local_rank, pair in pairs.items():
            outputs = {1: self.stdouts[local_rank], 2: self.stderrs[local_rank]}
            files = {number: path for number, path in outputs.items() if path}
            environ = nccl.of(os.environ) | self.envs[local_rank]  # a fork server may have no such variables
            order = function_rank.CopiedRank(environ, files, held, agent=os.getpid(), by_lines=self._is_read)
            process = context.Process(
                target=function_rank.become_rank, args=(order, pair[1], *self._function(local_rank))
            )
            process.start()

            def poll(process: Any = process) -> int | None:
                process.join(_STATUS_S)  # A fork server passes on the exit code a moment after the end.
                return process.exitcode  # type: ignore[no-any-return]

            self._add(local_rank, pair, process.pid, poll=poll, close=process.close)

    def _poll(self) -> RunProcsResult | None:
        """torch's hook: returns the result once all ranks have ended, with the values that functions returned.

        Raises:
            FtError: a value cannot be unpickled in this process.
        """
        result = super()._poll()
        if result is not None and not result.is_failed():
            result.return_values = {
                rank: None if rank in self.ignored else _value(rank, process)
                for rank, process in self._processes.items()
            }
        return result

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """torch's hook: ends what is left of the ranks, then releases channels and processes."""
        super()._close(death_sig, timeout)
        for process in self._processes.values():
            process.close()


def _execute(order: RankOrder) -> subprocess.Popen[bytes]:
    """Starts a rank of a function in a new interpreter, with the options of this one (-O, -W, -X)."""
    assert order.channel is not None
    with descriptor_limit.of_user() as give_back:
        process = subprocess.Popen(
            [
                os.fsdecode(spawn.get_executable()),
                # As multiprocessing does it: the ranks run with the user's -O, -W and -X options.
                *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                *("-u", rank_program.bootstrap(), *order.arguments, str(order.channel)),
            ],
            env=dict(order.environ),
            stdout=order.streams.get(1),
            stderr=order.streams.get(2),
            pass_fds=[order.channel],
            start_new_session=True,
        )
        give_back(process.pid)
    return process


def _value(local_rank: int, process: FunctionProcess) -> Any:
    """Returns what the function of a rank has returned.

    Raises:
        FtError: the value cannot be unpickled in this process.
    """
    try:
        # Safe: sealed memory that only this rank could send, see `sealed_pickle`.
        return pickle.loads(process.value or b"")
    except Exception as error:
        text = f"what local rank {local_rank} returned cannot be read here: {type(error).__name__}: {error}"
        raise FtError(text) from error
