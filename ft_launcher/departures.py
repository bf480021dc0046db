"""Tells the ranks' store that a rank is gone: a thread for each, since that waits until the others took note.

Says when they did, or why not, and ends with the cycle whatever it waits for. What is told stands in `rungs.py`, what
is written in the contract.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
from dataclasses import dataclass

from ft_launcher.process_tree import SessionTree
from ft_launcher.rung_steps import Tell
from ft_launcher.store_threads import Keys, StoreThreads
from rank_monitor.contract.departure import depart, withdraw

_TERMINATED = "TERMINATED"


@dataclass(frozen=True)
class Told:
    """The others know of a rank's end; `problem`: why they may not."""

    local_rank: int
    problem: str


class Departures:
    """Of one cycle.

    Args:
        threads: at the cycle's store; to be closed before this.
        stop_s: from SIGTERM to SIGKILL for what a dead rank left.
    """

    def __init__(self, threads: StoreThreads, stop_s: float) -> None:
        self._threads, self._stop_s = threads, stop_s
        self._told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)

    def fileno(self) -> int:
        """Readable when `take` has something."""
        return self._bell.fileno()

    def tell(self, order: Tell, pid: int) -> None:
        """Begins to tell; then ends what the rank's process `pid` left running."""

        def speak(keys: Keys) -> None:
            record = json.dumps({"rank": order.member, "interruption": _TERMINATED})
            (withdraw if order.joins else depart)(keys, order.member, record, order.limit_s)
            SessionTree(pid).stop(signal.SIGTERM, self._stop_s)

        def end(problem: str) -> None:
            self._told.put(Told(order.local_rank, problem))
            with contextlib.suppress(OSError):
                self._ring.send(b"!")

        self._threads.start(f"ft_departure{pid}", order.prefix, speak, end)

    def take(self) -> list[Told]:
        """What was told since the last call."""
        with contextlib.suppress(OSError):
            self._bell.recv(64)
        return [self._told.get_nowait() for _ in range(self._told.qsize())]

    def close(self) -> None:
        """Nothing is taken any more."""
        self._ring.close()
        self._bell.close()
