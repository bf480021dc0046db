"""The two connections of one node to the store: one for waits, one for the rest, each made anew after it was lost.

There are only two, since each takes a descriptor of the store's host: a job of 1,000 nodes needs 2,000 there. The link
of the node (`node_link.py`), `key_waiter.py` and `questions.py` use them.

    `waits`    `ft_node_await` alone: it blocks on a key for as long as an hour.
    `shared`   all other threads. Nothing may block on it: an operation waits at most for those that other threads began
               before it, so a beat is never late by more than those.

Which operations run is the caller's. Failed work is tried again: by the caller (`once`), or here until it succeeds
(`until_done`). A first failure is not logged, since one lost connection is nothing to act on; the second in a row is,
then one each minute, in one line for all threads. `failing_for` returns what has failed for too long, although other
work may succeed: a node of which the store accepts beats and no messages has no part in the job either.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ft_launcher.job.store.job_store import JobStore
from rank_monitor.contract.errors import StoreLost

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_NO_ROUTE = frozenset({errno.ENETUNREACH, errno.ENETDOWN})
"""Not EHOSTUNREACH: it also says that a host of the own network is down."""
LOG_EVERY_S = 60.0
"""Often enough to be found near the end of a log, seldom enough not to fill it."""


class Failures:
    """Failures in a row of one kind of work, until `worked`. Pure.

    Only work that fails soon after it began counts. A wait that was cut after a while, by a proxy's limit for idle
    connections for example, had been accepted by the store, and is simply begun again.

    Attributes:
        lasted_s: seconds from the first failure of the row to the last.
        reason: the last error, in words.

    Args:
        soon_s: work that lasted longer than this before it failed starts the row anew (seconds).
    """

    def __init__(self, soon_s: float) -> None:
        self._soon_s = soon_s
        self.reason = ""
        self.worked()

    def worked(self) -> None:
        """Ends the row: the work succeeded."""
        self.lasted_s = 0.0
        self._first: float | None = None
        self._logged_at: float | None = None

    def failed(self, began: float, now: float, reason: str) -> bool:
        """Counts a failure of work that began at `began`. Returns whether to log it: the second, then one a minute."""
        self.reason = reason
        if self._first is None or now - began > self._soon_s:
            self.worked()
            self._first = now
            return False
        self.lasted_s = now - self._first
        is_due = self._logged_at is None or now - self._logged_at >= LOG_EVERY_S
        if is_due:
            self._logged_at = now
        return is_due


class Connection:
    """One connection, made when it is first used. Several threads may use it; torch's client takes one call at a time.

    Args:
        first: the connection from which others are made (`JobStore.another`).
        store: a connection to begin with.
    """

    def __init__(self, first: JobStore, store: JobStore | None = None) -> None:
        self._first = first
        self._store = store
        self._lock = threading.Lock()

    def open(self) -> JobStore:
        """Returns the connection; makes one if there is none.

        Raises:
            StoreLost: none can be made.
        """
        with self._lock:
            self._store = self._store or self._first.another()
            return self._store

    def drop(self, store: JobStore | None = None) -> None:
        """Forgets the connection if it is still `store` (None: in any case); the next `open` makes a new one.

        The comparison keeps a thread that failed late from dropping the connection that another thread made meanwhile.
        """
        with self._lock:
            if store is None or store is self._store:
                self._store = None


class Connections:
    """The connections of one node.

    Args:
        first: an open connection, which becomes the shared one.
        pause_s: delay in seconds before a thread tries again.

    Attributes:
        shared: for all that does not block.
        waits: for waits.
        trouble: the last error of the store, until an answered beat clears it; None: the store answers.
        closed: set when the node leaves; work that fails is not tried again then.
    """

    def __init__(self, first: JobStore, pause_s: float) -> None:
        self._pause_s = pause_s
        self.shared = Connection(first, first)
        self.waits = Connection(first)
        self.trouble: StoreLost | None = None
        self.closed = threading.Event()
        self._failures: dict[str, Failures] = {}
        self._quiet_until = 0.0

    def once(self, work: Callable[[JobStore], _T], what: str, connection: Connection | None = None) -> _T:
        """Runs `work` once on a connection and returns its result. Blocks as long as `work` does.

        Args:
            work: called with the connection.
            what: names the work in the log. Failures are counted under this name.
            connection: None: the shared one.

        Raises:
            StoreLost: the store does not answer; the next call makes a new connection.
        """
        used = connection or self.shared
        failures = self._failures.setdefault(what, Failures(self._pause_s))
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
                # One line for all kinds of work: they fail together when the store does.
                self._quiet_until = now + LOG_EVERY_S
                logger.warning("the rendezvous' store refuses %s (%s); it is tried again", what, lost)
            raise
        failures.worked()
        return result

    def has_no_route(self) -> bool:
        """Returns whether the last error says that this node has no route to the store's network.

        Then the node has lost its own network, and the store may be well: the exit code of the node says so.
        """
        error: BaseException | None = self.trouble
        while error is not None:
            if isinstance(error, OSError) and error.errno in _NO_ROUTE:
                return True
            error = error.__cause__ or error.__context__
        return False

    def failing_for(self, limit_s: float) -> str:
        """Describes the work that has failed in a row for `limit_s` seconds, and why; empty if none has."""
        found = [(what, row) for what, row in list(self._failures.items()) if row.lasted_s >= limit_s]
        return "; ".join(f"{what}: {row.reason}" for what, row in found)

    def until_done(self, work: Callable[[JobStore], _T], what: str, connection: Connection | None = None) -> _T | None:
        """Runs `work` until the store answers, and returns its result; None if closed before. Blocks."""
        while not self.closed.is_set():
            try:
                return self.once(work, what, connection)
            except StoreLost:
                self.closed.wait(self._pause_s)
        return None
