"""How a thread that answers a request has the agent's thread ask the monitors, and waits a bounded time for it."""

from __future__ import annotations

import os
import threading
import time

from ft_launcher.status.other_nodes import OtherNodes

_FRESH_S = 0.2
"""Who asks so soon after another gets what that one got: a thousand clients cost no more than a few."""
_COLLECTIVES_FRESH_S = 2.0
"""The same for collectives: a full flight recorder of a rank takes 40 ms for its answer."""


class Asking:
    """One launcher's. `ask` is for the threads of servers, everything else for the agent's thread.

    Attributes:
        other_nodes: by which the other nodes of the job can be asked; None: there are none, or they cannot be asked.
    """

    def __init__(self) -> None:
        self.other_nodes: OtherNodes | None = None
        self._condition = threading.Condition()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._asked = self._answered = 0
        self._answered_at = 0.0
        self._with_stacks = False
        self._with_collectives = False
        self._collected_at = 0.0
        self._is_attended = False

    def ask(self, limit_s: float, stacks: bool = False, collectives: bool = False) -> bool | None:
        """Waits until all monitors were asked and have answered, or until the limit (seconds).

        Args:
            stacks: have the ranks write their stacks too; this asks for collectives as well.
            collectives: ask torch's flight recorder in each rank.

        Returns:
            Whether the agent's thread has attended to it; None: no rank runs, so nobody could be asked.
        """
        with self._condition:
            if not self._is_attended:
                return None
            now = time.monotonic()
            collectives = collectives and now >= self._collected_at + _COLLECTIVES_FRESH_S
            if not (stacks or collectives) and now < self._answered_at + _FRESH_S:
                return True
            if collectives:
                self._collected_at = now
            self._asked += 1
            ticket = self._asked
            self._with_stacks |= stacks
            self._with_collectives |= collectives
            os.eventfd_write(self._event, 1)
            self._condition.wait_for(lambda: self._answered >= ticket or not self._is_attended, limit_s)
            return self._answered >= ticket or not self._is_attended

    def fileno(self) -> int:
        """The descriptor that is readable when somebody asks."""
        return self._event

    def attend(self, is_attended: bool) -> None:
        """Says whether the agent's thread looks at the descriptor from now on. Who waits is released if it does not."""
        with self._condition:
            self._is_attended = is_attended
            self._condition.notify_all()

    def take(self) -> tuple[int, bool, bool]:
        """Returns the number of requests so far, and whether one of the new ones wants stacks, and collectives."""
        with self._condition:
            try:
                os.eventfd_read(self._event)
            except BlockingIOError:
                pass
            stacks, self._with_stacks = self._with_stacks, False
            collectives, self._with_collectives = self._with_collectives, False
            return self._asked, stacks, collectives

    def answer(self, number: int) -> None:
        """Releases who has asked until `number`."""
        with self._condition:
            self._answered = max(self._answered, number)
            self._answered_at = time.monotonic()
            self._condition.notify_all()

    def close(self) -> None:
        """Closes the descriptor; nobody asks any more."""
        with self._condition:
            self._is_attended = False
            self._condition.notify_all()
            os.close(self._event)
