"""Threads that wait in the ranks' store of one cycle, and `EventQueue`, in which threads leave items for the agent.

Threads: `StoreThreads.start` starts one for each wait, with a name of the caller's. Each has a connection of its own: a
client of torch's store serves one call at a time, so a wait would block every other thread on the same connection. The
threads end with the cycle. torch cannot interrupt a wait, so `close` has the thread `ft_release` write the keys that
the others wait for.

Used by the other files of this room and by `agent/standalone.py`. Knows nothing of what the threads wait for.
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch.distributed import PrefixStore, TCPStore

from rank_monitor.contract.errors import StoreLost, one_line
from rank_monitor.contract.processes import resolver
from rank_monitor.contract.processes.making_store import making_store
from rank_monitor.contract.rounds.barrier import release

_CONNECT_S = 20.0
"""Seconds for a connection. The store of a running cycle takes one at once; where its host is lost, torch's own limit
is five minutes."""
THREAD_ENDS_S = 0.5
"""Seconds that the end of a cycle waits for each thread: a restart must not wait for a store that is lost."""
_OVER = "the cycle is over"
"""The value of keys that `close` writes, and the text of the error that ends a wait then."""

_T = TypeVar("_T")


def connect(host: str, port: int) -> TCPStore:
    """Returns a new connection to the store of a running cycle."""
    limit = datetime.timedelta(seconds=_CONNECT_S)
    with resolver.towards(host, port) as address, making_store():
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)


class Keys(PrefixStore):  # type: ignore[misc]
    """The keys with one prefix in the store, over a connection for one thread.

    Args:
        prefix: of all keys.
        store: a connection to the store.
        over: set when the cycle is over.

    Attributes:
        name: the prefix.
        awaited: the keys that the thread waits for, which `StoreThreads.close` writes.
    """

    def __init__(self, prefix: str, store: Any, over: threading.Event) -> None:
        super().__init__(prefix, store)
        self.name, self.awaited = prefix, list[str]()
        self._over = over

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        """Waits for keys, as torch's store does.

        Raises:
            StoreLost: the cycle ended before or during the wait.
        """
        self.awaited = keys
        if not self._over.is_set():
            # Also ends when `close` has written the awaited keys; the event tells this from a real answer.
            super().wait(keys, timeout)
        if self._over.is_set():
            raise StoreLost(_OVER)


class StoreThreads:
    """The threads of one cycle. The agent's thread calls all methods.

    Args:
        connect: called in each thread; returns a new connection to the ranks' store, or raises what a store raises.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._waiting: dict[str, Keys] = {}

    @property
    def is_over(self) -> bool:
        """Whether `close` was called."""
        return self._over.is_set()

    def start(self, name: str, prefix: str, task: Callable[[Keys], None], end: Callable[[str], None]) -> None:
        """Starts a thread. Returns at once: the thread itself connects to the store.

        An example, as `rank_loss.py` has it: `end` puts the outcome into a queue that the agent's loop watches.

            threads.start("ft_departure4711", prefix, task=lambda keys: depart(keys, ...), end=notified.put)

        Args:
            name: of the thread, unique in the cycle.
            prefix: of the keys that `task` gets.
            task: called in the thread.
            end: called in the thread after `task`, with the error in one line; empty: there was none.
        """
        thread = threading.Thread(target=self._run, args=(name, prefix, task, end), daemon=True, name=name)
        self._threads = [*(earlier for earlier in self._threads if earlier.is_alive()), thread]
        thread.start()

    def close(self) -> None:
        """Ends the threads; waits `THREAD_ENDS_S` for each.

        Call it when the ranks have ended: it writes keys that ranks would otherwise read as answers.
        """
        if self._over.is_set():
            return
        self._over.set()
        if not self._has_threads():
            return
        releasing = threading.Thread(target=self._release, daemon=True, name="ft_release")
        releasing.start()
        # A thread that is in torch's code when Python ends would abort the process.
        for thread in self._threads:
            thread.join(THREAD_ENDS_S)
        if not self._has_threads():
            # The store answers, but its server may go next: a connection made meanwhile fails after 20 s only.
            releasing.join(THREAD_ENDS_S)

    def _has_threads(self) -> bool:
        """Returns whether a thread has not ended."""
        return any(thread.is_alive() for thread in self._threads)

    def _run(self, name: str, prefix: str, task: Callable[[Keys], None], end: Callable[[str], None]) -> None:
        """The thread's function. Arguments as of `start`."""
        problem = ""
        try:
            keys = self._waiting[name] = self._keys(prefix)
            task(keys)
        except Exception as error:  # A store raises errors of many kinds. The agent decides what follows.
            problem = one_line(error)
        self._waiting.pop(name, None)
        end(problem)

    def _keys(self, prefix: str) -> Keys:
        """Returns the keys with a prefix over a new connection. Blocks while the store does not answer."""
        store = self._connect()
        with making_store():
            return Keys(prefix, store, self._over)

    def _release(self) -> None:
        """The function of the thread `ft_release`: writes every key that a thread waits for."""
        with contextlib.suppress(Exception):  # A store that is gone ends every wait by itself.
            for keys in list(self._waiting.values()):
                another = self._keys(keys.name)
                for key in keys.awaited:
                    release(another, key, _OVER)


class EventQueue(Generic[_T]):
    """A queue of items that wakes the cycle loop. Any thread puts items; the agent's thread drains them in order.

    The loop waits for descriptors, so a byte in a pair of sockets goes with each item. The items themselves are in a
    queue of this process: a byte that finds the socket full is dropped, and no item is lost.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[_T] = queue.SimpleQueue()
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._wakeup_reader.setblocking(False)
        self._wakeup_writer.setblocking(False)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `drain` has something."""
        return self._wakeup_reader.fileno()

    def put(self, item: _T) -> None:
        """Adds an item. Does not block. Any thread may call this, also after `close`, when nobody reads the item."""
        self._items.put(item)
        with contextlib.suppress(OSError):
            self._wakeup_writer.send(b"!")

    def drain(self) -> list[_T]:
        """Returns the items since the last call. Does not block."""
        with contextlib.suppress(OSError):
            # Only empties the socket: the queue has the items.
            self._wakeup_reader.recv(64)
        return [self._items.get_nowait() for _ in range(self._items.qsize())]

    def close(self) -> None:
        """Closes the descriptors."""
        self._wakeup_writer.close()
        self._wakeup_reader.close()
