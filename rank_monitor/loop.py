"""An event loop: calls functions when descriptors are ready. Used by monitors and by the template.

It uses epoll directly: a monitor wakes often, and `selectors` would cost it a tenth of its time and memory.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

# A monitor has at most 14 descriptors: agent, listener, rank, pidfd, lease, and nine connections without a hello. epoll
# is level-triggered here, so what did not fit is returned by the next call.
_MAX_EVENTS = 16


class Loop:
    """The descriptors that are watched, each with its callback. Not to be used across a fork: epoll is shared then."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._events: dict[int, int] = {}

    def watch(
        self, descriptor: int, callback: Callable[[], None], writable: bool = False, readable: bool = True
    ) -> None:
        """Calls `callback` when the descriptor is readable or writable, as asked for, and when its peer has closed."""
        events = 0
        if readable:
            events |= select.EPOLLIN
        if writable:
            events |= select.EPOLLOUT
        known = self._events.get(descriptor)
        self._callbacks[descriptor], self._events[descriptor] = callback, events
        if known is None:
            self._epoll.register(descriptor, events)
        elif known != events:
            self._epoll.modify(descriptor, events)

    def unwatch(self, descriptor: int) -> None:
        """Stops watching a descriptor; harmless if it was not watched. To be called before the descriptor is closed."""
        if self._callbacks.pop(descriptor, None) is not None:
            del self._events[descriptor]
            self._epoll.unregister(descriptor)

    def wait(self, timeout_s: float | None) -> None:
        """Waits for the first event, at most `timeout_s` seconds (None: no limit), and calls the callbacks.

        The timeout of epoll_wait(2) is in whole milliseconds. So whole ones are waited here, and the rest is slept at
        the next call.
        """
        if timeout_s is not None:
            whole_ms = int(timeout_s * 1000)
            if whole_ms == 0:
                time.sleep(timeout_s)
            # Python rounds the timeout up to whole milliseconds; half a millisecond less gives exactly `whole_ms`.
            timeout_s = max(0.0, whole_ms - 0.5) / 1000
        for descriptor, _ in self._epoll.poll(timeout_s, _MAX_EVENTS):
            callback = self._callbacks.get(descriptor)
            if callback is not None:
                callback()

    def close(self) -> None:
        """Closes epoll's descriptor; those that were watched stay open."""
        self._epoll.close()
        self._callbacks.clear()
