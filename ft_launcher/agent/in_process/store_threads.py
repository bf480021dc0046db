"""Threads that wait in the ranks' store of one cycle, each over a connection of its own; they end with the cycle.

Used by the other files of this room and by `agent/standalone.py`. A client of torch's store serves one call at a time,
so a wait would block every other thread that shared its connection. What they find they leave in an `EventQueue`. Knows
nothing of what the threads wait for.
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from torch.distributed import PrefixStore, TCPStore

from rank_monitor.contract.errors import StoreLost, one_line
from rank_monitor.contract.processes import resolver
from rank_monitor.contract.rounds.barrier import release

# The store of a running cycle takes a connection at once. Where its host is lost, torch's own limit is five minutes.
_CONNECT_S = 20.0
# Per thread, at the end of a cycle: a restart must not wait for a store that is lost.
_END_S = 0.5
_OVER = "the cycle is over"

_T = TypeVar("_T")


def connect(host: str, port: int) -> TCPStore:
    """Returns a new connection to the store of a running cycle."""
    limit = datetime.timedelta(seconds=_CONNECT_S)
    with resolver.towards(host, port) as address:
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)


class Keys(PrefixStore):  # type: ignore[misc]
    """The keys of a call with prefix `name`, over a connection for one thread; `awaited`: those that it waits for."""

    def __init__(self, prefix: str, store: Any, over: threading.Event) -> None:
        super().__init__(prefix, store)
        self.name, self.awaited = prefix, list[str]()
        self._over = over

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        """As torch's.

        Raises:
            StoreLost: the cycle ended before or during the wait.
        """
        self.awaited = keys
        if not self._over.is_set():
            # torch cannot interrupt a wait, so `close` writes the awaited keys instead; the event says that it did.
            super().wait(keys, timeout)
        if self._over.is_set():
            raise StoreLost(_OVER)


class StoreThreads:
    """The threads of one cycle.

    Args:
        connect: called in each thread; returns a new connection to the ranks' store, or raises what a store raises.
        making: held while an object of torch is made around that connection.
    """

    def __init__(self, connect: Callable[[], Any], making: AbstractContextManager[Any] | None = None) -> None:
        self._connect = connect
        self._making = making or nullcontext()
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._waiting: dict[str, Keys] = {}

    @property
    def is_over(self) -> bool:
        """Whether `close` was called."""
        return self._over.is_set()

    def start(self, name: str, prefix: str, task: Callable[[Keys], None], end: Callable[[str], None]) -> None:
        """Starts a thread. Returns at once; the thread itself connects to the store.

        Args:
            name: of the thread; unique among them.
            prefix: of the keys that `task` gets.
            task: called in the thread.
            end: called in the thread at its end, with the error in one line; empty: none.
        """
        thread = threading.Thread(target=self._run, args=(name, prefix, task, end), daemon=True, name=name)
        self._threads = [*(former for former in self._threads if former.is_alive()), thread]
        thread.start()

    def close(self) -> None:
        """Ends the threads. Call it when the ranks have ended: it writes the keys that the threads wait for."""
        if self._over.is_set():
            return
        self._over.set()
        if any(thread.is_alive() for thread in self._threads):
            threading.Thread(target=self._release, daemon=True, name="ft_release").start()
        for thread in self._threads:  # one that waits in torch when Python ends would abort the process
            thread.join(_END_S)

    def _run(self, name: str, prefix: str, task: Callable[[Keys], None], end: Callable[[str], None]) -> None:
        problem = ""
        try:
            keys = self._waiting[name] = self._keys(prefix)
            task(keys)
        except Exception as error:  # of any kind that a store raises: the agent decides
            problem = one_line(error)
        self._waiting.pop(name, None)
        end(problem)

    def _keys(self, prefix: str) -> Keys:
        store = self._connect()
        with self._making:
            return Keys(prefix, store, self._over)

    def _release(self) -> None:
        with contextlib.suppress(Exception):  # a store that is gone ends every wait by itself
            for keys in list(self._waiting.values()):
                another = self._keys(keys.name)
                for key in keys.awaited:
                    release(another, key, _OVER)


class EventQueue(Generic[_T]):
    """Where threads leave what they found for the cycle loop: letters, in the order in which they came."""

    def __init__(self) -> None:
        self._letters: queue.SimpleQueue[_T] = queue.SimpleQueue()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)

    def fileno(self) -> int:
        """Readable when `take` has something."""
        return self._bell.fileno()

    def put(self, letter: _T) -> None:
        """Leaves a letter. Does not block; may be called in any thread, and does no harm after `close`."""
        self._letters.put(letter)
        with contextlib.suppress(OSError):
            self._ring.send(b"!")

    def drain(self) -> list[_T]:
        """Returns the letters since the last call. Does not block."""
        with contextlib.suppress(OSError):
            # Only empties the socket: the queue has the contents.
            self._bell.recv(64)
        return [self._letters.get_nowait() for _ in range(self._letters.qsize())]

    def close(self) -> None:
        """Closes the descriptors; letters that come later are read by nobody."""
        self._ring.close()
        self._bell.close()
