"""What a node awaits: keys of one kind, answers or ends of cycles, each until it has a value. Decides nothing.

A thread waits in the store for one after the other. A connection that died unheard would never let it go, hence another
thread looks for the last key from time to time.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable

from ft_launcher.nodes.coordination import LONG_S
from ft_launcher.nodes.job_store import JobStore
from ft_launcher.nodes.lines import Lines
from rank_monitor.contract.errors import StoreLost


class Awaited:
    """Of one node, until its lines are closed and `close` is called.

    Args:
        name: what is awaited.
        lines: those of the node.
        ours: nobody else awaits these keys, so each is removed once it is there.
    """

    def __init__(self, name: str, lines: Lines, ours: bool) -> None:
        self._lines, self._ours = lines, ours
        self._name = f"the wait for {name}"
        self._keys: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._open: list[str] = []
        self._came: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._untaken_since: float | None = None
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self.thread = threading.Thread(target=self._await, daemon=True, name=f"ft_node_{name}")
        self.thread.start()

    def fileno(self) -> int:
        """Readable when a value came."""
        return self._bell.fileno()

    def expect(self, key: str) -> None:
        """Awaits this key, too; returns at once."""
        self._open.append(key)
        self._keys.put(key)

    def take(self, key: str, limit_s: float) -> bytes | None:
        """The value of a key that was expected; None: it did not come within `limit_s`. Forgets those before it."""
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(64)
        self._untaken_since = None
        with contextlib.suppress(queue.Empty):
            while True:
                came, text = self._came.get(timeout=limit_s)
                if came == key:
                    return text
        return None

    def untaken_s(self, now: float) -> float:
        """For how long a value that came has not been taken."""
        since = self._untaken_since
        return 0.0 if since is None else now - since

    def look(self, store: JobStore) -> None:
        """Looks for the key expected last, beside the thread.

        Raises:
            StoreLost: the store does not answer.
        """
        for key in self._open[-1:]:
            if (text := store.receive(key, 0)) is not None:
                self._take_in(key, text)

    def let_go(self, store: JobStore, before: str = "", text: Callable[[str], str] = lambda key: "") -> None:
        """Frees the thread from keys that nobody will write any more: those expected `before` this one, else all.

        They are given the `text` for each.

        Raises:
            StoreLost: the store does not answer.
        """
        keys = list(self._open)
        if before:
            keys = keys[: keys.index(before)] if before in keys else []
        if keys:
            store.publish({key: text(key) for key in keys})

    def close(self) -> None:
        """Nothing more will be expected."""
        self._keys.put(None)

    def _await(self) -> None:
        while (key := self._keys.get()) is not None:
            text = None
            while text is None and not self._lines.closed.is_set():
                text = self._lines.until_done(lambda store: store.receive(key, LONG_S), self._name)
            self._open.remove(key)
            if text is not None:
                self._take_in(key, text)
                if self._ours:
                    with contextlib.suppress(StoreLost):
                        self._lines.once(lambda store: store.drop(key), "the removal of what was read")

    def _take_in(self, key: str, text: bytes) -> None:
        self._untaken_since = self._untaken_since or time.monotonic()
        self._came.put((key, text))
        with contextlib.suppress(BlockingIOError):
            self._ring.send(b"!")
