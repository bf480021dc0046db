"""The lines of one node to the store: one for waits, one for the rest, each made anew after it was lost.

There are no more than these two, since each takes a descriptor of the store's host. Threads share the second one, on
which nothing may block: an operation waits at most for those that others began before it. Knows nothing of what is
said on them. What fails is tried again, and said: at the second failure in a row, then every minute, in one line for
all threads; `failing_for` says when that has lasted too long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ft_launcher.nodes.failures import SAY_EVERY_S, Failures
from ft_launcher.nodes.job_store import JobStore
from rank_monitor.contract.errors import StoreLost

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Line:
    """One connection, or none until it is used. Several threads may use it.

    Args:
        first: what other connections are made from.
        store: a connection to begin with.
    """

    def __init__(self, first: JobStore, store: JobStore | None = None) -> None:
        self._first, self._store = first, store
        self._lock = threading.Lock()

    def open(self) -> JobStore:
        """The connection.

        Raises:
            StoreLost: there is none, and none can be made.
        """
        with self._lock:
            self._store = self._store or self._first.another()
            return self._store

    def drop(self, store: JobStore | None = None) -> None:
        """The next call makes a new connection, if this is still the one that is used; None: whichever that is."""
        with self._lock:
            if store is None or store is self._store:
                self._store = None


class Lines:
    """`trouble` is what went wrong last, until the node's beats clear it; `closed` ends all that tries again.

    Args:
        first: a connection to begin with: from now on the line for all but waits.
        rest_s: how long a thread rests before it tries again.
    """

    def __init__(self, first: JobStore, rest_s: float) -> None:
        self._rest_s = rest_s
        self.rest, self.waits = Line(first, first), Line(first)
        self.trouble: StoreLost | None = None
        self.closed = threading.Event()
        self._failures: dict[str, Failures] = {}
        self._quiet_until = 0.0

    def once(self, work: Callable[[JobStore], _T], what: str, line: Line | None = None) -> _T:
        """What `work` gives on a line, by default the one for all but waits.

        `what` names it, and its failures are counted under that.

        Raises:
            StoreLost: the store does not answer; the next call makes a new connection.
        """
        used = line or self.rest
        failures = self._failures.setdefault(what, Failures(self._rest_s))
        began = time.monotonic()
        store: JobStore | None = None
        try:
            store = used.open()
            result = work(store)
        except StoreLost as lost:
            if store is not None:
                used.drop(store)
            self.trouble = lost
            now = time.monotonic()
            if failures.failed(began, now, str(lost)) and now >= self._quiet_until and not self.closed.is_set():
                self._quiet_until = now + SAY_EVERY_S
                logger.warning("the rendezvous' store refuses %s (%s); it is tried again", what, lost)
            raise
        failures.worked()
        return result

    def failing_for(self, limit_s: float) -> str:
        """What has failed again and again for so long, and why; empty: nothing has."""
        found = [(what, one) for what, one in list(self._failures.items()) if one.lasted_s >= limit_s]
        return "; ".join(f"{what}: {one.why}" for what, one in found)

    def until_done(self, work: Callable[[JobStore], _T], what: str, line: Line | None = None) -> _T | None:
        """What `work` gives once the store answers; None: closed."""
        while not self.closed.is_set():
            try:
                return self.once(work, what, line)
            except StoreLost:
                self.closed.wait(self._rest_s)
        return None
