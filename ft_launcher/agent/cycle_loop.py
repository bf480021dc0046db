"""Waits for the events of one cycle until it has ended. Made by the node agent for each cycle.

`cycle/cycle.py` decides by these events when that is. What happened, and what follows, is not known here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence, Set
from typing import Protocol

from ft_launcher.cycle.cycle import Cycle, CyclePhase, Event
from rank_monitor.contract.processes.wait import readable


class EventSource(Protocol):
    """What can end a cycle, or must be looked after while one runs."""

    def descriptors(self) -> set[int]:
        """Readable when `attend` has something to do."""

    def next_check(self) -> float | None:
        """When to call `attend` even if nothing is readable (monotonic seconds); None: no need."""

    def attend(self, ready: Set[int]) -> Iterable[Event]:
        """Does what is due, and returns the events since the last call. Blocks only for questions with a bound.

        Args:
            ready: the descriptors of all sources that are readable now.
        """


class CycleLoop:
    """The loop of one cycle.

    Args:
        rank_count: number of ranks of this node.
        sources: attended in this order at each wake-up, whichever of them has woken the loop.
    """

    def __init__(self, rank_count: int, sources: Sequence[EventSource]) -> None:
        self._cycle = Cycle(rank_count)
        self._sources = sources

    def run(self) -> CyclePhase:
        """Blocks until the cycle has ended; returns the phase in which it did."""
        while self._cycle.phase is CyclePhase.RUNNING:
            descriptors = set[int]().union(*(source.descriptors() for source in self._sources))
            ready = readable(descriptors, self._wait_limit())
            for source in self._sources:
                for event in source.attend(ready):
                    self._cycle.on(event)
        return self._cycle.phase

    def _wait_limit(self) -> float | None:
        """How long to wait for a descriptor (seconds); None: without limit."""
        checks = [source.next_check() for source in self._sources]
        due = [moment for moment in checks if moment is not None]
        if not due:
            return None
        return max(0.0, min(due) - time.monotonic())
