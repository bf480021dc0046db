"""The keys by which the agents of a cycle assign ranks, in the cycle's store. A wait in them ends with the cycle.

`handler.py` gives it to torch's agent, which waits there for every other agent of the cycle, in a thread of
`agent/ending_signal.py`. torch's wait has the store's own limit of a minute: one of the agents may have left before it
came here, and the others would hear of that so much later.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import DistStoreError, PrefixStore

from rank_monitor.contract.rounds.barrier import release

logger = logging.getLogger(__name__)

_PREFIX = "ft_launcher_agents"
_NOBODYS = "-"
"""The value of a key that no agent will write any more; nobody reads it, since the waits for it raise."""


class AgentsStore:
    """What torch's agent uses of a store. Other operations are those of the store itself, and do not end early.

    Args:
        store: this node's client of the cycle's store.
        connect: makes another client, since a wait keeps a client to itself.
    """

    def __init__(self, store: Any, connect: Callable[[], Any]) -> None:
        self._store = PrefixStore(_PREFIX, store)
        self._connect = connect
        self._lock = threading.Lock()
        self._awaited: list[str] = []
        self._has_ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        """Waits for the value of a key.

        Raises:
            DistStoreError: the cycle has ended, or time is up.
        """
        return self._read([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits for the values of several keys. Raises as `get`."""
        return self._read(list(keys))

    def end(self) -> None:
        """Ends a wait in progress, and every later one. Returns at once; called by the thread that hears of the end."""
        with self._lock:
            self._has_ended = True
            awaited = self._awaited
        if awaited:
            with contextlib.suppress(
                RuntimeError
            ):  # no more threads on this host: then the store's limit ends the wait
                threading.Thread(target=self._release, args=(awaited,), daemon=True, name="ft_release").start()

    def _read(self, keys: list[str]) -> list[bytes]:
        self._await(keys)
        values: list[bytes] = self._store.multi_get(keys)
        self._await([])
        return values

    def _await(self, keys: list[str]) -> None:
        with self._lock:
            self._awaited = keys
            if self._has_ended:
                raise DistStoreError("the cycle ended while its agents assigned ranks")

    def _release(self, keys: list[str]) -> None:
        try:
            other = PrefixStore(_PREFIX, self._connect())
            for key in keys:
                release(other, key, _NOBODYS)
        except (RuntimeError, OSError) as error:
            logger.debug("the store of an ended cycle cannot be reached: %s", error)
