"""Waits for keys of the store, of several kinds, one after the other, each until it has a value.

`node_link.py` has one `Awaited`, which puts each value into the queue of its kind (`ValueQueue`): answers to arrivals,
addresses of cycles' stores, ends of cycles, and what a preempted node waits for. Nothing is decided here.

Threads: `ft_node_await` waits in the store for the key that was expected first, on the node's connection for waits. It
sees the next key only then, so keys must be written in the order in which they are expected; the coordinator does that.
The agent's thread gets the values from the queues. `expect`, `close` and the queues may be used in any thread.

A wait on a connection that died unnoticed would never end: a firewall that forgot the connection sends no reset. Hence
`ft_node_speak` looks for all expected keys from time to time (`check`). Where it finds the one that is waited for, the
thread that waits is left behind, and another one continues on a new connection.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable

from ft_launcher.job.link.connections import Connections
from ft_launcher.job.link.coordinator_service import LONG_S
from ft_launcher.job.store.job_store import JobStore
from rank_monitor.contract.errors import StoreLost

_WHAT = "the wait for an answer"


class ValueQueue:
    """Received values of one kind, in the order of their arrival.

    Args:
        ours: no other node awaits these keys, so each is removed from the store once it was read.
    """

    def __init__(self, ours: bool = False) -> None:
        self.ours = ours
        self._received: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()

    def pop(self, key: str, limit_s: float) -> bytes | None:
        """Waits up to `limit_s` seconds for the value of an expected key; None if it did not arrive.

        Discards the values that arrived before it: they are of an earlier arrival or cycle, and nobody asks for them
        any more.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                received, text = self._received.get(timeout=limit_s)
                if received == key:
                    return text
        return None

    def put(self, key: str, text: bytes) -> None:
        """Adds a value. Called by the thread that waits, or by the one that looks."""
        self._received.put((key, text))


class PollableValueQueue(ValueQueue):
    """A queue with a descriptor that is readable when there is a value, for a loop that waits for several sources."""

    def __init__(self) -> None:
        super().__init__()
        self._wakeup_read, self._wakeup_write = socket.socketpair()
        self._wakeup_read.setblocking(False)
        self._wakeup_write.setblocking(False)
        self._unread_since: float | None = None

    def fileno(self) -> int:
        """Returns a descriptor that is readable when there is a value."""
        return self._wakeup_read.fileno()

    def pop(self, key: str, limit_s: float) -> bytes | None:
        """See base class."""
        with contextlib.suppress(BlockingIOError):
            self._wakeup_read.recv(64)
        self._unread_since = None
        return super().pop(key, limit_s)

    def unread_s(self, now: float) -> float:
        """Returns for how many seconds a value has been in the queue; 0 when there is none.

        The lease is not renewed while this grows: an agent that does not read the end of its cycle hangs.
        """
        since = self._unread_since
        if since is None:
            return 0.0
        return now - since

    def put(self, key: str, text: bytes) -> None:
        """See base class."""
        self._unread_since = self._unread_since or time.monotonic()
        super().put(key, text)
        with contextlib.suppress(BlockingIOError):
            self._wakeup_write.send(b"!")


class Awaited:
    """The keys that one node awaits. Its thread ends once the connections are closed and `close` was called.

    Args:
        connections: the node's.
        on_failure: called by the thread that waits, with an unexpected exception by which it ends.

    Attributes:
        thread: the one that waits now.
    """

    def __init__(self, connections: Connections, on_failure: Callable[[Exception], None]) -> None:
        self._connections = connections
        self._on_failure = on_failure
        self._expected: list[tuple[str, ValueQueue]] = []
        self._changed = threading.Condition()
        self._ended = False
        self.thread = threading.Thread()
        self._begin()

    def expect(self, key: str, values: ValueQueue) -> None:
        """Adds a key to wait for; its value goes into the queue. Returns at once."""
        with self._changed:
            self._expected.append((key, values))
            self._changed.notify_all()

    def check(self, store: JobStore) -> None:
        """Looks for the keys from another thread than the one that waits; does not wait for them.

        A value that is found here goes into its queue, and may come a second time from the thread that waits. That does
        no harm: `ValueQueue.pop` discards what was not asked for.

        Raises:
            StoreLost: the store does not answer.
        """
        for number, (key, values) in enumerate(list(self._expected)):
            text = store.receive(key, limit_s=0)
            if text is None:
                continue
            values.put(key, text)
            # The thread waits for the first key: since it did not see the value, its connection is dead.
            if number == 0:
                self._replace_thread(key, values)

    def _replace_thread(self, key: str, values: ValueQueue) -> None:
        """Has another thread wait, on a new connection, unless this one has received the value of `key` meanwhile.

        Two threads that go on would both receive the same key, or one would wait for a key that the other has removed.
        """
        # Before the lock: another thread may hold the connection for seconds while it connects.
        self._connections.waits.drop()
        with self._changed:
            if self._expected[:1] == [(key, values)]:
                self._begin()

    def release(
        self, store: JobStore, values: ValueQueue, before: str = "", text: Callable[[str], str] = lambda key: ""
    ) -> None:
        """Ends the waits for keys that nobody will write any more, by writing them.

        A wait in torch cannot be cancelled, so the key must be there.

        Args:
            store: any connection but the one for waits.
            values: the keys whose values go into this queue are concerned.
            before: only keys that are expected before this one; empty: all keys of the queue.
            text: key -> the value to write.

        Raises:
            StoreLost: the store does not answer.
        """
        keys = [key for key, of in list(self._expected) if of is values]
        if before:
            if before in keys:
                keys = keys[: keys.index(before)]
            else:
                keys = []
        if keys:
            store.publish({key: text(key) for key in keys})

    def close(self) -> None:
        """Ends the thread once no key is awaited; nothing more may be expected."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _begin(self) -> None:
        """Starts a thread that waits. One that waited before is left behind, and ends once its wait does."""
        self.thread = threading.Thread(target=self._run, daemon=True, name="ft_node_await")
        self.thread.start()

    def _run(self) -> None:
        """The function of `ft_node_await`: waits for one key after the other."""
        try:
            while self._await_one():
                pass
        except Exception as error:
            self._on_failure(error)

    def _await_one(self) -> bool:
        """Waits for the key that was expected first, and puts its value into the queue. Blocks.

        Returns:
            Whether to go on: False once no key will be expected any more, or another thread has replaced this one.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._expected or self._ended)
            if not self._expected or self._connections.closed.is_set():
                return False
            expected = self._expected[0]
        key, values = expected
        text: bytes | None = None
        while text is None and not self._connections.closed.is_set():
            text = self._connections.until_done(
                lambda store: store.receive(key, LONG_S), _WHAT, self._connections.waits
            )
        with self._changed:
            if threading.current_thread() is not self.thread:
                return False
            self._expected.remove(expected)
        if text is not None:
            values.put(key, text)
            if values.ours:
                with contextlib.suppress(StoreLost):
                    self._connections.once(lambda store: store.drop(key), "the removal of what was read")
        return True
