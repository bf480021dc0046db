"""The watcher of one call: a thread that waits in the store for events that concern all ranks, and queues them.

`call.py` starts one watcher for each call of a wrapped function. The watcher decides nothing: it reads the keys that
`contract/rounds/round.py` describes, in the order in which they are released:

    started -> outcome -> (after a fault) closed -> started of the next round ...

Threads: `StoreWatcher` is a daemon thread. It blocks on one key at a time, on a connection to the store that no other
thread uses, so nothing polls. After a fault it calls `interrupt`, which aborts collectives and interrupts the main
thread, and blocks until the function has ended; only then it queues INTERRUPTED. So the main thread, which reads
`events`, never sees INTERRUPTED while something of the user's still runs.
The main thread may set `stopped`; every other attribute belongs to the watcher.
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

    The value is of a different type for each kind:

    - STARTED: the text that says where the round's store server is (`round_stores.variables_of` reads it).
    - ENDED: a text, why there is no further round.
    - INTERRUPTED: the number of the round. The function of this rank was aborted and interrupted before.
    - CLOSED: a `Closed`, how the round ended and who takes part in the next.
    - DONE: None.
    - LOST: the exception. The store does not answer any more, or holds an invalid value.
    """

    kind: RestartEvent
    value: Any = None


class StoreWatcher(threading.Thread):
    """The watcher's thread. `start()` begins the watch; `events` is the queue that the main thread reads.

    Args:
        store: a connection that no other thread uses.
        number: the round to begin with: the call's first, or the first that lets in a rank that was started again.
        entry_rank: the number of this rank at entry of the call.
        interrupt: called in the watcher's thread, with the number of the round, when the round is interrupted by a
            fault and when the store is lost. Blocks until no function of the user's runs on this rank.
    """

    def __init__(self, store: Any, number: int, entry_rank: int, interrupt: Callable[[int], object]) -> None:
        super().__init__(name="ft_client in-process watcher", daemon=True)
        self.events: queue.SimpleQueue[StoreEvent] = queue.SimpleQueue()
        self.stopped = False
        """Set by the main thread when this rank leaves: the next key that is released ends the watch. The watcher
        cannot be woken earlier, since it waits inside torch's store."""
        self._store, self._number, self._entry_rank, self._interrupt = store, number, entry_rank, interrupt

    def run(self) -> None:
        """Runs until the call is done, this rank takes no part any more, or the store is lost.

        A lost store interrupts the main thread, too: without the store no fault of another rank would ever reach it.
        """
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
        """Follows one round from its start to its end. Blocks. Returns whether there is a next round for this rank.

        `started` may also be "fault": the round was interrupted before every rank had arrived. Then neither STARTED
        nor ENDED is queued, and `outcome`, which the same fault released, follows at once.
        """
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
        return not self.stopped and closed.has(self._entry_rank)

    def _await(self, key: str) -> str:
        """Waits for a key that is written once and never deleted. Returns its value."""
        self._store.wait([key], EVER)
        return str(self._store.get(key).decode())
