"""What the agent's loop of a cycle polls: the base class of the ranks, the membership, the signals and the tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Set
from contextlib import AbstractContextManager, nullcontext

from ft_launcher.agent.cycle.cycle import Event


class EventSource(ABC):
    """What can end a cycle, or must be looked after while one runs."""

    def during_cycle(self) -> AbstractContextManager[None]:
        """Returns the context in which the loop of a cycle runs."""
        return nullcontext()

    def descriptors(self) -> set[int]:
        """Readable when `poll` has something to do."""
        return set()

    def next_check(self) -> float | None:
        """When to call `poll` even if nothing is readable (monotonic seconds); None: no need."""
        return None

    @abstractmethod
    def poll(self, ready: Set[int]) -> Iterable[Event]:
        """Does what is due, and returns the events since the last call. Blocks only for questions with a bound.

        Args:
            ready: the descriptors of all sources that are readable now.
        """
