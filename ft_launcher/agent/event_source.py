"""What the agent's loop of a cycle polls: the base class of the ranks, the membership, the signals and the tools.

`node_agent.py: run_cycle` is the loop. It blocks until a descriptor of any source is readable, or until the earliest
`next_check`, and then polls every source. So no source has a thread of its own for waiting, and none may block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Set
from contextlib import AbstractContextManager, nullcontext

from ft_launcher.agent.cycle.cycle import Event


class EventSource(ABC):
    """What can end a cycle, or has work to do while one runs. All methods are called on the agent's thread."""

    def during_cycle(self) -> AbstractContextManager[None]:
        """Returns a context that is open while the loop of a cycle runs: for what must begin and end with each
        cycle."""
        return nullcontext()

    def descriptors(self) -> set[int]:
        """Returns descriptors of which one is readable when `poll` has something to do. Asked again for each wait."""
        return set()

    def next_check(self) -> float | None:
        """Returns when to call `poll` even if no descriptor is readable (monotonic seconds); None: no need."""
        return None

    @abstractmethod
    def poll(self, ready: Set[int]) -> Iterable[Event]:
        """Does what is due, and returns the events since the last call.

        Called at each wake-up of the loop, also for a descriptor of another source. May block for a second or two, for
        a question to the monitors, but for nothing that has no bound.

        Args:
            ready: the descriptors of all sources that are readable now.
        """
