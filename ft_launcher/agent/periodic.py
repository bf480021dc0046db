"""`Periodic`: has a function called again and again while ranks run, without a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Set

from ft_launcher.agent.cycle.cycle import Event
from ft_launcher.agent.event_source import EventSource


class Periodic(EventSource):
    """Calls a function on the agent's thread, at the first wake-up of a cycle and then after each period. Between two
    cycles it is not called.

    Args:
        call: must not block.
        period_s: seconds from one call to the next.
    """

    def __init__(self, call: Callable[[], None], period_s: float) -> None:
        self._call = call
        self._period_s = period_s
        self._due = time.monotonic()

    def next_check(self) -> float:
        """Returns when the next call is due (monotonic seconds)."""
        return self._due

    def poll(self, ready: Set[int]) -> Iterable[Event]:
        """Calls the function if it is due. Has no events."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._period_s
            self._call()
        return ()
