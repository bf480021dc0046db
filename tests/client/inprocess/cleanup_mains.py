"""What the ranks of `test_cleanup.py` run. One function owns a writer thread, and ends it in each of six forms.

The writer takes `CLEANUP_S` to end, as one that flushes to a slow disk does. A cleanup that is cut off leaves it
running in the next round.

The other is in the standard library's handling of locks nearly always. The locks outlive a round, as those of
loggers and of a queue to a writer do: one that an interruption leaves locked stops the next round, whose only way
out is a soft timeout, and so for ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from torch import distributed

from ft_client.inprocess.call_wrapper import CallWrapper
from ft_client.inprocess.wrapper import Wrapper
from tests.client.inprocess.corner_mains import note_warnings
from tests.client.inprocess.job import QUICK, seconds
from tests.client.inprocess.mains import LONG_S, Note, of_iteration, sum_of_ranks

CLEANUP_S = 1.5
_WRITER = "writer of the training"


class Writer:
    """A thread that writes until it is closed, and then still has `CLEANUP_S` of work."""

    def __init__(self) -> None:
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._write, name=_WRITER, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when everything is written."""
        self._ends.set()
        self._thread.join()

    def _write(self) -> None:
        self._ends.wait()
        time.sleep(CLEANUP_S)


class ClosedAtExit(Writer):
    """A writer that is its own context manager."""

    def __enter__(self) -> ClosedAtExit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def by_finally(work: Callable[[], None]) -> None:
    writer = Writer()
    try:
        work()
    finally:
        writer.close()


def by_exit(work: Callable[[], None]) -> None:
    with ClosedAtExit():
        work()


def by_handler(work: Callable[[], None]) -> None:
    writer = Writer()
    try:
        work()
    except BaseException:
        writer.close()
        raise


def by_exit_stack(work: Callable[[], None]) -> None:
    @contextlib.contextmanager
    def written() -> Iterator[None]:
        writer = Writer()
        try:
            yield
        finally:
            writer.close()

    with contextlib.ExitStack() as stack:
        stack.enter_context(written())
        work()


def by_executor(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1, thread_name_prefix=_WRITER) as pool:
        ends = threading.Event()
        pool.submit(lambda: (ends.wait(), time.sleep(CLEANUP_S)))
        try:
            work()
        finally:
            ends.set()


def by_closing(work: Callable[[], None]) -> None:
    """The writer belongs to a generator that the function iterates over: closing that closes the writer."""

    def batches() -> Iterator[int]:
        with contextlib.closing(Writer()):
            yield from range(10)

    for _ in batches():
        work()


FORMS: dict[str, Callable[[Callable[[], None]], None]] = {
    "finally": by_finally,
    "exit": by_exit,
    "handler": by_handler,
    "exit stack": by_exit_stack,
    "executor": by_executor,
    "closing": by_closing,
}


def cleans_up(note: Note, collective: bool, grace_s: float | None = None) -> Any:
    """Rank 0 fails; each other rank is healthy and cleans up, in a form of its own."""
    entry = int(os.environ["RANK"])
    form = list(FORMS)[entry - 1]

    def work() -> None:
        of_iteration().add("at work", 1)
        if collective:
            distributed.barrier()
        time.sleep(LONG_S)

    def function(call: CallWrapper) -> int:
        if call.iteration:
            note(("alive", [thread.name for thread in threading.enumerate() if thread.name.startswith(_WRITER)]))
            return call.iteration
        if collective:
            sum_of_ranks()
        if entry == 0:
            while of_iteration().add("at work", 0) < call.state.world_size - 1:
                time.sleep(0.01)
            raise ValueError("the function failed")
        FORMS[form](work)
        return -1

    note_warnings(note)
    options = {} if grace_s is None else {"interrupt_grace": seconds(grace_s)}
    return Wrapper(**QUICK, **options)(function)()


class Locks:
    """A queue to another thread, a condition and a logger, which both threads use."""

    def __init__(self) -> None:
        self._queue: queue.Queue[int] = queue.Queue(4)
        self._condition = threading.Condition(threading.Lock())
        self._slots = threading.Semaphore(2)
        self._log = logging.Logger("of the training")
        self._log.addHandler(logging.NullHandler())
        self._log.addHandler(_Formatting())
        threading.Thread(target=self._write, daemon=True).start()

    def step(self, number: int) -> None:
        """Takes each lock once."""
        self._queue.put(number)
        with self._slots, self._condition:
            self._condition.notify_all()
        self._log.warning("step %d", number)

    def _write(self) -> None:
        while True:
            number = self._queue.get()
            with self._slots, self._condition:
                self._condition.wait(0.0)
            self._log.warning("wrote %d", number)


class _Formatting(logging.Handler):
    """Has a lock, as every handler, and writes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.lock: Any = threading.Lock()  # a lock that its owner can take twice would hide that it was left locked

    def emit(self, record: logging.LogRecord) -> None:
        self.format(record)


def lock_heavy(note: Note, restarts: int) -> Any:
    """Restarts in a row; the ranks take turns in failing, and the others work with locks."""
    entry = int(os.environ["RANK"])
    note_warnings(note)
    locks = Locks()

    def function(call: CallWrapper) -> int:
        fails_at = 20 if call.iteration % call.state.world_size == entry else -1
        number = 0
        while call.iteration < restarts:
            call.ping()
            locks.step(number)
            number += 1
            if number == fails_at:
                raise ValueError("the function failed")
        return call.iteration

    timeouts = {"soft_timeout": seconds(5), "hard_timeout": seconds(60)}
    logging.getLogger("ft_client.inprocess").setLevel(logging.WARNING)
    return Wrapper(**{**QUICK, **timeouts})(function)()
