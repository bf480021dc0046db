"""What the ranks of `test_locks.py` run: a function that is in the standard library's handling of locks nearly always.

The locks outlive an iteration, as those of loggers and of a queue to a writer do: one that an interruption leaves
locked stops the next iteration, whose only way out is a soft timeout, and so for ever.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from typing import Any

from ft_client.inprocess.call_wrapper import CallWrapper
from ft_client.inprocess.wrapper import Wrapper
from tests.client.inprocess.corner_mains import note_warnings
from tests.client.inprocess.job import QUICK, seconds
from tests.client.inprocess.mains import Note


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
