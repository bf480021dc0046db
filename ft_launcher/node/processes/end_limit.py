"""Ends the launcher's process where its own end after a signal stands still.

Usually the agent's thread reads the signals, has the ranks save, and ends the launcher. It may be stuck in a call that
nothing can interrupt, such as one on a file system that does not answer. Then it reads no further signal, and neither a
scheduler's SIGTERM nor a user's Ctrl-C would ever end the launcher.

Threads: `ft_end_limit` sleeps until the first signal arrives, and looks five times a second from then on. It ends the
process when both conditions hold: the time that the signals leave is over, and the agent's thread has not read the
signals for `_UNREAD_S`. It knows nothing of ranks: the template ends them when its launcher is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ft_launcher.node.processes.signals import SignalPipe

_UNREAD_S = 10.0
"""Seconds in which the agent's thread has not read the signals, after which it counts as stuck. No bounded wait on the
launcher's way out is longer, so a launcher that is merely slow is left alone."""
_LOOK_S = 0.2
"""Seconds between two looks, once a signal has arrived: the process leaves so much later than its limit at most."""


class EndLimit:
    """Watches the end of this process until `close`. Made by `composition.py`, once, before the job begins.

    Args:
        signals: the launcher's signals.
        limit_s: called with the signals that have arrived, in order. Returns how long the end may take after the last
            of them (seconds).
        leave: called with the first signal, in the thread `ft_end_limit`. Must end the process.
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
        """Ends the watch. Does not wait for the thread."""
        self._is_over.set()
        self._signals.wake()

    def _watch(self) -> None:
        """The thread's function: waits for the first signal, then looks every `_LOOK_S` until `close`."""
        self._signals.await_first()
        deadline, counted = float("inf"), 0
        while not self._is_over.wait(_LOOK_S):
            now = time.monotonic()
            unread_s = now - self._signals.read_at
            arrived = self._signals.arrived
            # A peek takes the signals out of the pipe for a moment. A reader that is at work must not miss them.
            if unread_s >= 1.0:
                arrived = arrived + self._signals.peek()
            # A further signal can only shorten the time that is left (a second Ctrl-C).
            if len(arrived) > counted:
                counted = len(arrived)
                deadline = min(deadline, now + self._limit_s(arrived))
            if now >= deadline and unread_s >= _UNREAD_S:
                self._leave(arrived[0])
                return
