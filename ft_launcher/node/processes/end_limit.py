"""Ends this process when its own end after a signal stands still: in a call on a file system that does not answer.

The agent's thread reads the signals, has the ranks save and ends. Where that thread no longer attends to them, and the
time that the signals leave is over, a thread of this file leaves in its place. It knows nothing of ranks: the template
ends them when its launcher is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ft_launcher.node.processes.signals import SignalPipe

_UNREAD_S = 10.0
"""Seconds without a look at the signals: no wait of the launcher's end that is bounded takes longer by itself."""
_LOOK_S = 0.2
"""Seconds between two looks, once a signal has arrived."""


class EndLimit:
    """Watches the end of this process until `close`.

    Args:
        signals: of the launcher.
        limit_s: how long the end may take after the signals that have arrived, in order (seconds).
        leave: ends the process; gets the first signal. Called in the thread of this object.
    """

    def __init__(
        self, signals: SignalPipe, limit_s: Callable[[list[int]], float], leave: Callable[[int], object]
    ) -> None:
        self._signals = signals
        self._limit_s = limit_s
        self._leave = leave
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="ft_end_limit").start()

    def close(self) -> None:
        """Ends the watch."""
        self._is_over.set()
        self._signals.wake()

    def _watch(self) -> None:
        self._signals.await_first()
        deadline, counted = float("inf"), 0
        while not self._is_over.wait(_LOOK_S):
            now = time.monotonic()
            unread_s = now - self._signals.read_at
            arrived = self._signals.arrived
            if unread_s >= 1.0:
                arrived = arrived + self._signals.peek()
            if len(arrived) > counted:
                counted = len(arrived)
                deadline = min(deadline, now + self._limit_s(arrived))
            if now >= deadline and unread_s >= _UNREAD_S:
                self._leave(arrived[0])
                return
