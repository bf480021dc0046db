"""What a node awaits: keys of several kinds, one after the other, each until it has a value. Decides nothing.

One thread waits in the store, on the node's line for waits. So keys must come in the order in which they are expected;
the coordinator writes them so. A connection that died unheard would never let the thread go, hence another thread looks
for the keys from time to time; where it finds the one that is waited for, the wait goes on with a new connection.
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

_WHAT = "the wait for an answer"


class Box:
    """Values of one kind that came. `ours`: nobody else awaits these keys, so each is removed once it is there."""

    def __init__(self, ours: bool = False) -> None:
        self.ours = ours
        self._came: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()

    def take(self, key: str, limit_s: float) -> bytes | None:
        """The value of a key that was expected; None: it did not come within `limit_s`. Forgets those before it."""
        with contextlib.suppress(queue.Empty):
            while True:
                came, text = self._came.get(timeout=limit_s)
                if came == key:
                    return text
        return None

    def put(self, key: str, text: bytes) -> None:
        """A value came."""
        self._came.put((key, text))


class RingingBox(Box):
    """A box with a descriptor that is readable when a value came."""

    def __init__(self) -> None:
        super().__init__()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._untaken_since: float | None = None

    def fileno(self) -> int:
        """Readable when a value came."""
        return self._bell.fileno()

    def take(self, key: str, limit_s: float) -> bytes | None:
        """See base class."""
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(64)
        self._untaken_since = None
        return super().take(key, limit_s)

    def untaken_s(self, now: float) -> float:
        """For how long a value that came has not been taken."""
        since = self._untaken_since
        return 0.0 if since is None else now - since

    def put(self, key: str, text: bytes) -> None:
        """See base class."""
        self._untaken_since = self._untaken_since or time.monotonic()
        super().put(key, text)
        with contextlib.suppress(BlockingIOError):
            self._ring.send(b"!")


class Awaited:
    """Of one node, until its lines are closed and `close` is called."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._open: list[tuple[str, Box]] = []
        self._changed = threading.Condition()
        self._ended = False
        self.thread = threading.Thread()
        self._begin()

    def expect(self, key: str, box: Box) -> None:
        """Awaits this key, too, and puts its value into the box; returns at once."""
        with self._changed:
            self._open.append((key, box))
            self._changed.notify_all()

    def look(self, store: JobStore) -> None:
        """Looks for the keys, beside the thread.

        Raises:
            StoreLost: the store does not answer.
        """
        for number, (key, box) in enumerate(list(self._open)):
            if (text := store.receive(key, 0)) is not None:
                box.put(key, text)
                if number == 0:
                    self._lines.waits.drop()
                    self._begin()

    def let_go(self, store: JobStore, box: Box, before: str = "", text: Callable[[str], str] = lambda key: "") -> None:
        """Frees the thread from keys that nobody will write any more: those of a box expected `before` this one, else
        all of it.

        They are given the `text` for each.

        Raises:
            StoreLost: the store does not answer.
        """
        keys = [key for key, of in list(self._open) if of is box]
        if before:
            keys = keys[: keys.index(before)] if before in keys else []
        if keys:
            store.publish({key: text(key) for key in keys})

    def close(self) -> None:
        """Nothing more will be expected."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _begin(self) -> None:
        self.thread = threading.Thread(target=self._await, daemon=True, name="ft_node_await")
        self.thread.start()

    def _await(self) -> None:
        """Waits for one key after the other, unless another thread does so meanwhile."""
        while (expected := self._next()) is not None:
            key, box = expected
            text = None
            while text is None and not self._lines.closed.is_set():
                text = self._lines.until_done(lambda store: store.receive(key, LONG_S), _WHAT, self._lines.waits)  # noqa: B023
            if not self._is_mine():
                return
            with self._changed:
                self._open.remove(expected)
            if text is not None:
                box.put(key, text)
                if box.ours:
                    with contextlib.suppress(StoreLost):
                        self._lines.once(lambda store: store.drop(key), "the removal of what was read")  # noqa: B023

    def _next(self) -> tuple[str, Box] | None:
        """The key to wait for; None: there will be none any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._open or self._ended)
            return self._open[0] if self._open and not self._lines.closed.is_set() else None

    def _is_mine(self) -> bool:
        return threading.current_thread() is self.thread
