"""The lines of one node to the store: each of its threads has a connection of its own, made anew after it was lost.

Knows nothing of what is said on them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ft_launcher.nodes.job_store import JobStore
from rank_monitor.contract.errors import StoreLost

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

    def once(self, work: Callable[[JobStore], _T]) -> _T:
        """What `work` gives on this thread's line.

        Raises:
            StoreLost: the store does not answer; the next call makes a new connection.
        """
        try:
            store = self._own.store = self._own.store or self.first.another()
            return work(store)
        except StoreLost as lost:
            self._own.store, self.trouble = None, lost
            raise

    def until_done(self, work: Callable[[JobStore], _T]) -> _T | None:
        """What `work` gives once the store answers; None: closed."""
        while not self.closed.is_set():
            try:
                return self.once(work)
            except StoreLost:
                self.closed.wait(self._rest_s)
        return None
