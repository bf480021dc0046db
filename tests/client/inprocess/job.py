"""Real ranks that call a wrapped function, each a process of its own, and what they told.

The store is hosted by the test, as by an agent. Ranks are forked by a process that has torch loaded already.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import TCPStore

from tests.patience import patient
from tests.ports import free_port

LIMIT_S = 120.0
PRELOAD = ["torch.distributed", "ft_client.inprocess.wrapper"]
"""Of the one process per pytest worker that forks ranks."""


def seconds(number: float) -> datetime.timedelta:
    """A duration."""
    return datetime.timedelta(seconds=number)


QUICK: dict[str, Any] = {
    "last_call_wait": seconds(0),
    "soft_timeout": seconds(60),
    "hard_timeout": seconds(90),
    "barrier_timeout": seconds(100),
    "same_error_limit": 0,
    "no_progress_limit": 0,
    "soft_timeout_limit": 0,
}
"""Arguments under which no limit is reached, unless the test wants one."""


@dataclass
class Rank:
    """What one rank told: what it noted on its way, what the call returned or raised, and how the process ended."""

    notes: list[Any] = field(default_factory=list)
    result: Any = None
    error: str = ""
    exit_code: int | None = None
    pid: int = 0


class Job:
    """The ranks of one job."""

    def __init__(self, ranks: int, main: Callable[..., Any], hosted: bool = True, **arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._environment = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        if hosted:
            self.store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            self._environment |= {"MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        else:
            self._environment |= {"MASTER_PORT": str(free_port())}
        self.ranks = {rank: Rank() for rank in range(ranks)}
        self._processes: dict[int, BaseProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self._context, self._main, self._arguments = context, main, arguments
        for rank in range(ranks):
            self.start(rank)

    def start(self, rank: int, **more: str) -> None:
        """Starts one rank, perhaps again."""
        ours, theirs = self._context.Pipe()
        where = f"{self._main.__module__}:{self._main.__qualname__}"
        own = {**self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank), **more}
        process = self._context.Process(target=_live, args=(theirs, where, self._arguments, own), daemon=True)
        process.start()
        theirs.close()
        self._processes[rank], self._pipes[rank] = process, ours
        self.ranks[rank].pid = process.pid or 0

    def until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Listens until it holds."""
        deadline = time.monotonic() + patient(limit_s)
        while not condition():
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"not within {limit_s} s: {self.ranks}"
            self._listen(left_s)

    def noted(self, note: Any) -> list[int]:
        """The ranks that noted this."""
        return [rank for rank, told in self.ranks.items() if note in told.notes]

    def end(self, limit_s: float = LIMIT_S) -> dict[int, Rank]:
        """Waits for the end of all processes."""
        self.until(lambda: not self._pipes, limit_s)
        return self.ranks

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a rank a signal."""
        os.kill(self.ranks[rank].pid, number)

    def close(self) -> None:
        """Ends what is left."""
        for process in self._processes.values():
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGKILL)
                process.join(patient(LIMIT_S))

    def _listen(self, limit_s: float) -> None:
        for pipe in wait(list(self._pipes.values()), min(limit_s, 1.0)):
            rank = next(number for number, one in self._pipes.items() if one is pipe)
            told = self.ranks[rank]
            try:
                kind, value = pipe.recv()  # type: ignore[union-attr, call-arg]
            except (EOFError, ConnectionResetError):
                del self._pipes[rank]
                self._processes[rank].join(patient(LIMIT_S))
                told.exit_code = self._processes[rank].exitcode
                continue
            if kind == "note":
                told.notes.append(value)
            else:
                setattr(told, kind, value)


@contextlib.contextmanager
def job(ranks: int, main: Callable[..., Any], **arguments: Any) -> Iterator[Job]:
    """A job whose processes are gone afterwards."""
    made = Job(ranks, main, **arguments)
    try:
        yield made
    finally:
        made.close()


def _live(pipe: Connection, where: str, arguments: dict[str, Any], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    module, _, name = where.partition(":")
    main = getattr(importlib.import_module(module), name)
    try:
        pipe.send(("result", main(lambda note: pipe.send(("note", note)), **arguments)))
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        if os.environ.get("FT_SHOW"):
            traceback.print_exc()
        raise
