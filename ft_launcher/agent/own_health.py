"""The health of this node, as the agent uses it: checked before each cycle, and checked again while ranks run.

- Before a cycle the membership calls `check_node`, which blocks: an unhealthy node must not take part. If it is
  unhealthy, the membership leaves the job.
- While ranks run, `HealthWatch` repeats the checks and records changes. It never ends a cycle: ranks that work are
  worth more than a reading.

`node/health/` makes the checks, each in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing import SignalException

from ft_launcher.agent.cycle.cycle import Event
from ft_launcher.agent.ending_signal import EndingSignal
from ft_launcher.agent.event_source import EventSource
from ft_launcher.agent.parts import NodeParts
from ft_launcher.decide.health.check import State
from ft_launcher.decide.health.reading import changes, node_state
from ft_launcher.record.journal.contained import contained
from ft_launcher.record.ledger.account import Category

_REMOVAL_S = 2.0
"""Seconds that an unhealthy node waits for the removal of files in /dev/shm. The removal reads a thousand processes in
half a second."""


def check_node(parts: NodeParts, cycle: int, ending: EndingSignal) -> str:
    """Checks the health of this node, then waits until the memory of its GPUs is free again. Both waits have limits.

    Args:
        parts: of this launcher.
        cycle: number of the last cycle, under which the readings are recorded.
        ending: the signal that ends the launcher, which ends the waits.

    Returns:
        Why this node must not take part in a further cycle; empty: it may.

    Raises:
        SignalException: the launcher got a signal meanwhile.
    """
    parts.times.begins(Category.HEALTH)
    try:
        parts.memory.begin()
        readings = ending.call(parts.health.check)
        # A thread may still be removing what the last cycle's ranks left in /dev/shm. A /dev/shm that is full of such
        # files is no reason to leave the job: the node waits for the thread, and is checked again.
        if not node_state(readings).healthy and ending.call(lambda: parts.shared_memory.settle(_REMOVAL_S)):
            readings = ending.call(parts.health.check)
        state = node_state(readings)
        parts.recorder.checked(cycle, readings, state)
        if not state.healthy:
            return state.reason
        parts.recorder.gpu_memory_in_use(cycle, ending.call(parts.memory.wait))
        return ""
    except SignalException:
        # `EndingSignal.call` has left a thread behind that waits for the checks. No further round of checks follows.
        parts.health.close()
        raise
    finally:
        parts.memory.close()
        parts.times.begins(Category.RENDEZVOUS)


class HealthWatch(EventSource):
    """Repeats the health checks while ranks run. A source of events, which waits for no check and ends no cycle.

    Args:
        parts: of this launcher. `parts.health_watch` makes the checks.
        cycle: called for the number of the present cycle, under which a change is recorded.
    """

    def __init__(self, parts: NodeParts, cycle: Callable[[], int]) -> None:
        self._recorder = parts.recorder
        assert parts.health_watch is not None, "no check is to be repeated"
        self._checks = parts.health_watch
        self._cycle = cycle
        self._states: dict[str, State] = {}
        self._next_s: float | None = None
        self._reads = False

    @contextmanager
    def during_cycle(self) -> Iterator[None]:
        """Returns a context in which the checks are repeated. At its end running checks are killed."""
        self._plan_next()
        try:
            yield
        finally:
            self._next_s = None
            if self._reads:
                self._reads = False
                self._checks.stop()

    def descriptors(self) -> set[int]:
        """Returns the descriptors of the running checks."""
        return self._checks.descriptors()

    def next_check(self) -> float | None:
        """Returns when the next round begins or the running one is late (monotonic seconds); None: no ranks run."""
        if self._reads:
            return self._checks.next_check()
        return self._next_s

    def poll(self, ready: Set[int]) -> list[Event]:
        """Begins a round of checks when it is due, and records changes once it has ended. Returns no events."""
        if self._next_s is None:
            return []
        if not self._reads and time.monotonic() >= self._next_s:
            self._plan_next()  # Before the round, since a round that cannot begin must not be tried again at once.
            with contained("the health of this node cannot be read"):
                self._checks.begin()
                self._reads = True
        if self._reads and self._checks.poll(ready):
            self._reads = False
            self._plan_next()
            with contained("what the health checks found cannot be used"):
                found, self._states = changes(self._states, self._checks.pop())
                for change in found:
                    self._recorder.health_changed(self._cycle(), change)
        return []

    def _plan_next(self) -> None:
        """Sets when the next round of checks begins: one interval from now, however long the last round took."""
        self._next_s = time.monotonic() + self._checks.interval_s
