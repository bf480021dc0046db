"""An event loop: calls functions when descriptors are ready. Used by monitors and by the template.

One thread owns a loop; callbacks run in that thread inside `wait`, one after the other. So a callback must not block:
while it runs, no other one does, and no deadline is judged. What a callback raises leaves `wait`, and ends the process
where its caller does not catch it. So each callback contains what the bytes of others may cause.

epoll is used directly: a monitor wakes often, and `selectors` would cost it a tenth of its time and memory.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

_MAX_EVENTS = 16
"""Events that one wait returns. A monitor has at most 15 descriptors: agent, listener, rank, pidfd, lease, the
connection to the rank's flight recorder, and nine connections without a hello. epoll is level-triggered here: an event
that did not fit is returned by the next call."""


class Loop:
    """The descriptors that are watched, each with its callback. Not to be used across a fork: epoll is shared then."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._events: dict[int, int] = {}

    def watch(
        self, descriptor: int, callback: Callable[[], None], writable: bool = False, readable: bool = True
    ) -> None:
        """Watches a descriptor, or changes how a watched one is watched.

        `callback` is called from `wait` whenever the descriptor is readable or writable, as asked for, and whenever its
        peer has closed, which cannot be switched off (EPOLLHUP).
        """
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
        """Stops watching a descriptor; harmless if it was not watched.

        To be called before the descriptor is closed: the number may be given to another file at once.
        """
        if self._callbacks.pop(descriptor, None) is not None:
            del self._events[descriptor]
            self._epoll.unregister(descriptor)

    def wait(self, timeout_s: float | None) -> None:
        """Waits for the first event, at most `timeout_s` seconds (None: no limit), and calls the callbacks. Blocks.

        Raises what a callback raises; the callbacks of the other events are then called by the next `wait`.

        May return earlier than asked for: the caller computes what is due, and calls again. The timeout of
        epoll_wait(2) is in whole milliseconds. So the whole ones are waited here, and the rest, below one, is slept at
        the next call: a deadline is neither early nor up to a millisecond late.
        """
        if timeout_s is not None:
            whole_ms = int(timeout_s * 1000)
            if whole_ms == 0:
                time.sleep(timeout_s)
            # Python rounds the timeout up to whole milliseconds; half a millisecond less gives exactly `whole_ms`.
            timeout_s = max(0.0, whole_ms - 0.5) / 1000
        for descriptor, _ in self._epoll.poll(timeout_s, _MAX_EVENTS):
            callback = self._callbacks.get(descriptor)
            if callback is not None:  # a callback before this one may have stopped watching this descriptor
                callback()

    def close(self) -> None:
        """Closes epoll's own descriptor. The descriptors that were watched stay open."""
        self._epoll.close()
        self._callbacks.clear()
