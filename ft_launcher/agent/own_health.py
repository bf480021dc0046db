"""The health of this node, as the agent uses it: checked before each cycle, and read again while ranks run.

The memberships ask before a cycle, since an unhealthy node must not take part; the node agent has the readings go on
meanwhile. `node/health/` makes the checks, each in a process of its own. Decides nothing about the job: the membership
leaves it, and a reading during a cycle never ends that.
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
"""Seconds that an unhealthy node waits for it: a thousand processes are read in half a second."""


def check_node(parts: NodeParts, cycle: int, ending: EndingSignal) -> str:
    """Checks the health of this node; then waits, within bounds, until the memory of its GPUs is free again.

    Args:
        cycle: the last one, under which the readings are recorded.

    Returns:
        Why this node must not take part in a further cycle; empty: it may.

    Raises:
        SignalException: the launcher got a signal meanwhile.
    """
    parts.times.begins(Category.HEALTH)
    try:
        parts.memory.begin()
        readings = ending.call(parts.health.check)
        # What the ranks of the last cycle left in /dev/shm is no reason to leave if it is being removed.
        if not node_state(readings).healthy and ending.call(lambda: parts.shared_memory.settle(_REMOVAL_S)):
            readings = ending.call(parts.health.check)
        state = node_state(readings)
        parts.recorder.checked(cycle, readings, state)
        if not state.healthy:
            return state.reason
        parts.recorder.gpu_memory_in_use(cycle, ending.call(parts.memory.wait))
        return ""
    except SignalException:  # the thread of a check goes on, and no further round follows
        parts.health.close()
        raise
    finally:
        parts.memory.close()
        parts.times.begins(Category.RENDEZVOUS)


class HealthWatch(EventSource):
    """The readings of one job on this node while ranks run: a source of events, which waits for no check.

    Args:
        parts: of this launcher; its `health_watch` makes the checks.
        cycle: returns the number of the present cycle.
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
        """A context in which the node is read. At its end a running check is killed."""
        self._plan_next()
        try:
            yield
        finally:
            self._next_s = None
            if self._reads:
                self._reads = False
                self._checks.stop()

    def descriptors(self) -> set[int]:
        """Returns those of the running checks."""
        return self._checks.descriptors()

    def next_check(self) -> float | None:
        """When the next reading, or the deadline of the running one, is due (monotonic seconds); None: never."""
        if self._reads:
            return self._checks.next_check()
        return self._next_s

    def poll(self, ready: Set[int]) -> list[Event]:
        """Begins a reading when it is due, and records its result once it has ended. Returns nothing."""
        if self._next_s is None:
            return []
        if not self._reads and time.monotonic() >= self._next_s:
            self._plan_next()  # also if it fails: the loop must not try again at once
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
        self._next_s = time.monotonic() + self._checks.interval_s
