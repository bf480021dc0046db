"""Reads the health of this node while ranks run, and records what changed. A source of events that never ends a cycle.

Made by the node agent. `health/repeated.py` says which checks these are; each runs in a process of its own, and none is
waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

from ft_launcher.agent.parts import NodeParts
from ft_launcher.cycle.cycle import Event
from ft_launcher.health.check import State
from ft_launcher.health.repeated import changes
from ft_launcher.record.contained import contained


class HealthWatch:
    """The readings of one job on this node.

    Args:
        parts: of this launcher; its `health_watch` makes the checks.
        cycle: returns the number of the present cycle.
    """

    def __init__(self, parts: NodeParts, cycle: Callable[[], int]) -> None:
        self._recorder = parts.recorder
        self._checks = parts.health_watch
        self._cycle = cycle
        self._states: dict[str, State] = {}
        self._next_s: float | None = None
        self._reads = False

    @contextmanager
    def during_cycle(self) -> Iterator[None]:
        """A context in which the node is read. At its end a running check is killed."""
        self._plan_next()
        try:
            yield
        finally:
            self._next_s = None
            if self._checks is not None and self._reads:
                self._reads = False
                self._checks.health.stop()

    def descriptors(self) -> set[int]:
        """Returns those of the running checks."""
        if self._checks is None:
            return set()
        return self._checks.health.descriptors()

    def next_check(self) -> float | None:
        """When the next reading, or the deadline of the running one, is due (monotonic seconds); None: never."""
        if self._checks is not None and self._reads:
            return self._checks.health.next_check()
        return self._next_s

    def attend(self, ready: Set[int]) -> list[Event]:
        """Begins a reading when it is due, and records its result once it has ended. Returns nothing."""
        if self._checks is None or self._next_s is None:
            return []
        if not self._reads and time.monotonic() >= self._next_s:
            self._plan_next()  # also if it fails: the loop must not try again at once
            with contained("the health of this node cannot be read"):
                self._checks.health.begin()
                self._reads = True
        if self._reads and self._checks.health.attend(ready):
            self._reads = False
            self._plan_next()
            with contained("what the health checks found cannot be used"):
                found, self._states = changes(self._states, self._checks.health.take())
                for change in found:
                    self._recorder.health_changed(self._cycle(), change)
        return []

    def _plan_next(self) -> None:
        if self._checks is not None:
            self._next_s = time.monotonic() + self._checks.interval_s
