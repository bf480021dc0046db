"""Descriptors and what is called when they are ready. The kernel's epoll without more: a monitor wakes often, and
`selectors` would cost it a tenth of its time and memory."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

_MAX_EVENTS = 16


class Loop:
    """Not to be used across a fork: both processes would share its descriptors."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._events: dict[int, int] = {}

    def watch(
        self, descriptor: int, callback: Callable[[], None], writable: bool = False, readable: bool = True
    ) -> None:
        """Calls `callback` whenever the descriptor can be read or written, as asked for, and when it has ended."""
        events = (select.EPOLLIN if readable else 0) | (select.EPOLLOUT if writable else 0)
        known = self._events.get(descriptor)
        self._callbacks[descriptor], self._events[descriptor] = callback, events
        if known is None:
            self._epoll.register(descriptor, events)
        elif known != events:
            self._epoll.modify(descriptor, events)

    def forget(self, descriptor: int) -> None:
        """No longer watched; harmless if it was not. To be called before the descriptor is closed."""
        if self._callbacks.pop(descriptor, None) is not None:
            del self._events[descriptor]
            self._epoll.unregister(descriptor)

    def wait(self, timeout_s: float | None) -> None:
        """Waits for the first event, at most so long, and calls back for all.

        The kernel counts whole milliseconds: it is asked for those, and the rest is slept when it is called again.
        """
        if timeout_s is not None:
            whole_ms = int(timeout_s * 1000)
            if whole_ms == 0:
                time.sleep(timeout_s)
            timeout_s = max(0.0, whole_ms - 0.5) / 1000
        for descriptor, _ in self._epoll.poll(timeout_s, _MAX_EVENTS):
            callback = self._callbacks.get(descriptor)
            if callback is not None:
                callback()

    def close(self) -> None:
        """Lets go of everything."""
        self._epoll.close()
        self._callbacks.clear()
