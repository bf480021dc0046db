"""The watcher of one call: a thread that waits in the store for events of all ranks, and queues them in order.

`call.py` starts it. It waits for one key at a time, on a connection of its own, so nothing polls. When a round is
interrupted it first has the main thread interrupted, by a function that it was given; only then the event is queued. It
decides nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ft_client.inprocess.restart.machine import RestartEvent
from rank_monitor.contract.rounds.barrier import EVER
from rank_monitor.contract.rounds.round import DONE, END, GO, Closed, Round

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreEvent:
    """An event of the restart machine that concerns all ranks, with its `value`.

    STARTED: the note about the round's store server. ENDED: why there is no further round. INTERRUPTED: the
    number of the round; the function of this rank was aborted and interrupted. CLOSED: how it ended, as `Closed`.
    DONE: None. LOST: the exception; the store does not answer any more, or holds an invalid value.
    """

    kind: RestartEvent
    value: Any = None


class StoreWatcher(threading.Thread):
    """The watcher's thread.

    Args:
        store: a connection that no other thread uses.
        number: the round to begin with.
        member: this rank at entry.
        interrupt: called with the round's number on a fault, and when the store is lost.
    """

    def __init__(self, store: Any, number: int, member: int, interrupt: Callable[[int], object]) -> None:
        super().__init__(name="ft_client in-process watcher", daemon=True)
        self.events: queue.SimpleQueue[StoreEvent] = queue.SimpleQueue()
        self.stopped = False
        """This rank leaves: the next key is the last to wait for."""
        self._store, self._number, self._member, self._interrupt = store, number, member, interrupt

    def run(self) -> None:
        """Runs until the call is done, this rank takes no part any more, or the store is lost."""
        try:
            while self._follow(self._number):
                self._number += 1
        except Exception as problem:
            try:
                self._interrupt(self._number)
            finally:
                self.events.put(StoreEvent(RestartEvent.LOST, problem))
        finally:
            # A reference back to the call: it and its connections end now, not with some collection.
            del self._interrupt

    def _follow(self, number: int) -> bool:
        """Follows one round. Returns whether there is a next one for this rank."""
        this_round = Round(self._store, number)
        started = self._await(this_round.started)
        if self.stopped:
            return False
        if started.startswith(GO):
            self.events.put(StoreEvent(RestartEvent.STARTED, started.removeprefix(GO)))
        elif started.startswith(END):
            self.events.put(StoreEvent(RestartEvent.ENDED, started.removeprefix(END)))
        if self._await(this_round.outcome) == DONE:
            self.events.put(StoreEvent(RestartEvent.DONE))
            return False
        began = time.monotonic()
        self._interrupt(number)
        logger.debug("round %d is interrupted; aborted within %.3f s", number, time.monotonic() - began)
        self.events.put(StoreEvent(RestartEvent.INTERRUPTED, number))
        closed = Closed.read(self._await(this_round.closed).encode())
        self.events.put(StoreEvent(RestartEvent.CLOSED, closed))
        return not self.stopped and closed.has(self._member)

    def _await(self, key: str) -> str:
        self._store.wait([key], EVER)
        return str(self._store.get(key).decode())
