"""The lines of one node to the store: each of its threads has a connection of its own, made anew after it was lost.

Knows nothing of what is said on them. What fails is tried again, and said: at the second failure in a row, then every
minute, in one line for all threads; `failing_for` says when that has lasted too long.
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


class _Own(threading.local):
    store: JobStore | None = None


class Lines:
    """`trouble` is what went wrong last, until the node's beats clear it; `closed` ends all that tries again.

    Args:
        first: a connection to begin with.
        rest_s: how long a thread rests before it tries again.
    """

    def __init__(self, first: JobStore, rest_s: float) -> None:
        self.first, self._rest_s = first, rest_s
        self.trouble: StoreLost | None = None
        self.closed = threading.Event()
        self._own = _Own()
        self._failures: dict[str, Failures] = {}
        self._quiet_until = 0.0

    def once(self, work: Callable[[JobStore], _T], what: str) -> _T:
        """What `work` gives on this thread's line; `what` names it, and its failures are counted under that.

        Raises:
            StoreLost: the store does not answer; the next call makes a new connection.
        """
        failures = self._failures.setdefault(what, Failures(self._rest_s))
        began = time.monotonic()
        try:
            store = self._own.store = self._own.store or self.first.another()
            result = work(store)
        except StoreLost as lost:
            self._own.store, self.trouble = None, lost
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

    def until_done(self, work: Callable[[JobStore], _T], what: str) -> _T | None:
        """What `work` gives once the store answers; None: closed."""
        while not self.closed.is_set():
            try:
                return self.once(work, what)
            except StoreLost:
                self.closed.wait(self._rest_s)
        return None
