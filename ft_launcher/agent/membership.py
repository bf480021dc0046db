"""What the node agent needs of its node's part in the job, and of all that its cycle loop attends: two base classes.

`single_node.py` implements it for a node that decides by itself, `many_nodes.py` for one among several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch.distributed.elastic.agent.server.api import RunResult

from ft_launcher.agent.cycle.cycle import CyclePhase, Event
from ft_launcher.job.rendezvous.cycle_store import CycleStore


@dataclass(frozen=True)
class JobEnd:
    """How the job ended on this node: the launcher's exit code (None: as torch chooses), why, and torch's result."""

    exit_code: int | None
    reason: str
    result: RunResult


class NoFurtherCycle(Exception):
    """This node takes part in no further cycle; `end` says how the job ended for it."""

    def __init__(self, end: JobEnd) -> None:
        super().__init__(end.reason)
        self.end = end


class EventSource(ABC):
    """What can end a cycle, or must be looked after while one runs."""

    def during_cycle(self) -> AbstractContextManager[None]:
        """Returns the context in which the loop of a cycle runs."""
        return nullcontext()

    def descriptors(self) -> set[int]:
        """Readable when `attend` has something to do."""
        return set()

    def next_check(self) -> float | None:
        """When to call `attend` even if nothing is readable (monotonic seconds); None: no need."""
        return None

    @abstractmethod
    def attend(self, ready: Set[int]) -> Iterable[Event]:
        """Does what is due, and returns the events since the last call. Blocks only for questions with a bound.

        Args:
            ready: the descriptors of all sources that are readable now.
        """


class Membership(EventSource):
    """This node's part in the job: forms each cycle, can end it, and decides or learns what follows its end."""

    needs_agents_store: bool
    """Whether the agents meet in the store of a cycle again after its ranks were started."""

    @abstractmethod
    def form(self, assign_ranks: Callable[[], None]) -> CycleStore:
        """Forms the next cycle; returns its store. Blocks until then.

        Args:
            assign_ranks: torch's rendezvous.

        Raises:
            NoFurtherCycle: the job is over for this node.
            SignalException: the launcher got a signal.
        """

    @abstractmethod
    def names(self) -> tuple[list[str], list[str]]:
        """Host names of the cycle's nodes, by rank, and of waiting nodes; both empty where they are not known."""

    @abstractmethod
    def after(self, phase: CyclePhase) -> JobEnd | None:
        """Ends the ranks of a cycle that ended in `phase`; returns how the job ended, or None: the next cycle follows.

        Raises:
            SignalException: the launcher got a signal.
        """

    def leave(self, job_end: JobEnd | None) -> None:
        """Leaves the job for good; `job_end`: None when an exception ends the launcher. A second call does nothing.

        Nothing is to be left where torch's launcher closes the rendezvous.
        """
