"""A node's link to the others: sends its messages, waits for answers and for the end of its cycle, beats, and watches.

Four threads speak to the store, each on a connection of its own, so that the agent never does. The agent hears of a
cycle's end through one descriptor. Decides nothing but when this node must think itself cut off.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ft_launcher.nodes.coordination import BEAT, HOST, LONG_S, REPLY, Coordination, end_key, reply_key
from ft_launcher.nodes.job_store import JobStore
from ft_launcher.nodes.messages import Arrive, CycleEnd, NodeMessage, Place, decode, encode
from ft_launcher.nodes.rhythm import Rhythm, look_every
from ft_launcher.nodes.silence import own_limit_s
from ft_launcher.nodes.watch import Watch
from rank_monitor.contract.errors import ProtocolError, StoreLost

_T = TypeVar("_T")

_FIRST_S = 0.5
_LOOK_S = 0.02
_END_S = 0.5
_QUICK = 4
"""A beat that takes more than this part of a period is slow: then none is left out."""
_CHECK_EVERY = 4
"""Times the node timeout: how often the awaited key is looked for beside the thread that waits for it."""


@dataclass(frozen=True)
class Cut:
    """The store has not answered for so long that others may count this node as lost.

    `unreachable`: this node has no way to it; else nobody is there, or nobody answers.
    """

    reason: str
    unreachable: bool


class Link:
    """The link of one node.

    Args:
        node: its id.
        store: a connection to begin with.
        coordinate: becomes the coordinator in place of the one of the given term (0: there was none), if it can.
        beat_s, timeout_s: period of beats, and when a silent node is lost.
    """

    def __init__(
        self,
        node: str,
        store: JobStore,
        coordinate: Callable[[int], Coordination | None],
        beat_s: float,
        timeout_s: float,
    ) -> None:
        self.coordination: Coordination | None = None
        self._node, self._coordinate, self._beat_s, self._timeout_s = node, coordinate, beat_s, timeout_s
        self._hosts = store.hosted_here
        self._ends: queue.SimpleQueue[CycleEnd] = queue.SimpleQueue()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._outbox: queue.SimpleQueue[NodeMessage | None] = queue.SimpleQueue()
        self._cycles: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._answers_got: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._look_for: tuple[str, Callable[[bytes], None]] | None = None
        self._asked_at = ""
        self._closed = threading.Event()
        self._heard_at = self._checked_at = time.monotonic()
        self._trouble: Exception | None = None
        self._watches = False
        self._watch = Watch(beat_s, timeout_s)
        self._rhythm = Rhythm()
        self._first = store
        self._threads = [
            threading.Thread(target=loop, daemon=True, name=f"ft_node{loop.__name__}")
            for loop in (self._speak, self._beat, self._await_answers, self._await_ends)
        ]
        self._find_coordinator(store)
        for thread in self._threads:
            thread.start()

    def _find_coordinator(self, store: JobStore) -> None:
        """Whoever hosts the store coordinates; on a store apart from the nodes, whoever is first."""
        role, deadline = store.receive(BEAT, 0), time.monotonic() + _FIRST_S
        while role is None and store.may_have_host and time.monotonic() < deadline:
            time.sleep(_LOOK_S)  # a wait that ends without its key makes torch print two lines
            role = store.receive(BEAT, 0)
        if role is None:
            self.coordination = self._coordinate(0)
            role = store.receive(BEAT, 0)
        self._watches = role != HOST.encode()

    def fileno(self) -> int:
        """Readable when a cycle's end was told."""
        return self._bell.fileno()

    def take_end(self, cycle: int) -> CycleEnd | None:
        """The end of this cycle, once it was told."""
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(64)
        with contextlib.suppress(queue.Empty):
            while True:
                if (end := self._ends.get_nowait()).cycle == cycle:
                    return end
        return None

    def send(self, message: NodeMessage) -> None:
        """Sends a message to the coordinator; returns at once."""
        self._outbox.put(message)

    def ask(self, arrival: Arrive) -> None:
        """Sends an arrival, whose answer `answer` gives."""
        self._node = arrival.node
        self._outbox.put(arrival)
        self._asked.put(arrival.seq)

    def answer(self, seq: int, limit_s: float) -> bytes | None:
        """The answer to arrival number `seq`; None: none came within `limit_s`."""
        with contextlib.suppress(queue.Empty):
            came, text = self._answers_got.get(timeout=limit_s)
            return text if came == seq else None
        return None

    def entered(self, place: Place, deputies: int) -> None:
        """This node takes part in a cycle now. Of its members, `deputies` watch the coordinator closely."""
        self._watch.period_s = look_every(place.nodes) * self._beat_s if place.deputy else None
        deputies = 0 if place.deputy or not self._watches else min(deputies, place.nodes - 1)
        self._rhythm.serve(place.rank, place.nodes, deputies)
        self._cycles.put(place.cycle)

    def was_deposed(self) -> bool:
        """Whether this node was the coordinator and another has taken over; told once."""
        deposed = self._watches and self.coordination is not None and not self.coordination.at_work
        if deposed:
            self.coordination = None
        return deposed

    def trouble(self) -> Exception | None:
        """What went wrong with the store last; None while it answers."""
        return self._trouble

    def _coordinates(self) -> bool:
        """Whether this node is the coordinator."""
        return self.coordination is not None and self.coordination.at_work

    def cut(self, now: float) -> Cut | None:
        """Whether this node is cut off. To be asked four times a beat; time in which nobody asked does not count."""
        if self._hosts:
            failed = self.coordination is not None and not self.coordination.at_work and not self._closed.is_set()
            return Cut(self.coordination.why_ended, False) if self.coordination is not None and failed else None
        overslept = max(0.0, now - self._checked_at - 2 * self._beat_s)
        self._checked_at, self._heard_at = now, min(now, self._heard_at + overslept)
        limit_s = own_limit_s(self._timeout_s, self._beat_s)
        if now - self._heard_at < limit_s:
            return None
        why = f": {self._trouble}" if self._trouble else ""
        return Cut(f"the rendezvous' store gave no answer for {limit_s:g} s{why}", "unreachable" in why)

    def close(self, last: NodeMessage, limit_s: float) -> None:
        """Sends a last message and ends; a host of the store waits for the others to leave first, up to `limit_s`."""
        self._outbox.put(last)
        self._outbox.put(None)
        self._threads[0].join(min(limit_s, self._timeout_s if self._trouble is None else self._beat_s))
        if self.coordination is not None:
            if self._hosts:
                self.coordination.wait_for_leavers(limit_s)
            self.coordination.close()
        self._closed.set()
        self._asked.put(None)
        self._cycles.put(None)
        if self._trouble is None:  # a thread that waits in torch when Python ends would abort the process
            threading.Thread(target=self._wake, daemon=True, name="ft_wake").start()
            for thread in self._threads:
                thread.join(_END_S)

    def _wake(self) -> None:
        """Lets the thread go that waits for an answer which will not come; a cycle's end comes by itself."""
        if self._look_for is not None and self._look_for[0].startswith(REPLY):
            with contextlib.suppress(StoreLost):
                self._first.publish({self._look_for[0]: ""})

    # The threads.

    def _await_answers(self) -> None:
        store: JobStore | None = None
        while (seq := self._asked.get()) is not None:
            key = self._asked_at = reply_key(self._node, seq)
            self._look_for = (key, lambda text, seq=seq: self._answers_got.put((seq, text)))
            store = self._found(store, *self._look_for)
            self._asked_at = ""
            with contextlib.suppress(StoreLost):
                if store is not None:
                    store.drop(key)

    def _await_ends(self) -> None:
        store: JobStore | None = None
        while (cycle := self._cycles.get()) is not None:
            self._look_for = (end_key(cycle), self._told)
            store = self._found(store, *self._look_for)

    def _found(self, store: JobStore | None, key: str, use: Callable[[bytes], None]) -> JobStore | None:
        """Waits for a key and uses its value; returns the connection that is good now."""
        text = None
        while text is None and not self._closed.is_set():
            store, text = self._until_done(store, lambda connected: connected.receive(key, LONG_S))
        if text is not None:
            use(text)
        return store

    def _told(self, text: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            end = decode(text)
            if isinstance(end, CycleEnd):
                self._ends.put(end)
                with contextlib.suppress(BlockingIOError):
                    self._ring.send(b"!")

    def _until_done(self, store: JobStore | None, work: Callable[[JobStore], _T]) -> tuple[JobStore | None, _T | None]:
        """The connection that is good now, a new one where there was none, and what `work` gave; None: closed."""
        while not self._closed.is_set():
            try:
                store = store or self._first.another()
                return store, work(store)
            except StoreLost as lost:
                store, self._trouble = None, lost
                self._closed.wait(min(self._beat_s, 1.0))
        return store, None

    def _beat(self) -> None:
        """Beats, and does nothing else: on a slow line anything more would come between two beats."""
        store: JobStore | None = None
        took_s = 0.0
        while not self._closed.is_set():
            sent_at, key = time.monotonic(), self._beat_key()
            try:
                if self._rhythm.next_is_made(took_s < self._beat_s / _QUICK) and key:
                    store = store or self._first.another()
                    store.beat(key)
                    took_s = time.monotonic() - sent_at
                    self._heard_at, self._trouble = sent_at, None
            except StoreLost as lost:
                store, self._trouble = None, lost
            self._closed.wait(self._beat_s)

    def _beat_key(self) -> str:
        """Who is said to live: this node, or the coordinator, whose only beats these are; empty: nobody can say so.

        A coordinator that hangs is replaced, and its node with it: that one must be cut off before.
        """
        if self.coordination is None or not self.coordination.at_work:
            return self._node
        if self._hosts:
            return ""
        if self.coordination.has_looked():
            self._rhythm.looked()
        return BEAT if self.coordination.may_beat else ""

    def _speak(self) -> None:
        """Sends messages as they come; in between looks after the coordinator and the awaited key."""
        store: JobStore | None = None
        next_check = time.monotonic() + _CHECK_EVERY * self._timeout_s
        while True:
            with contextlib.suppress(queue.Empty):
                message = self._outbox.get(timeout=self._until_look_s())
                if message is None:
                    break
                text = encode(message)
                store, _ = self._until_done(store, lambda connected: connected.post(text))  # noqa: B023 (called at once)
                if isinstance(message, Arrive):
                    store = self._give_up_earlier(store, reply_key(message.node, message.seq))
                continue
            try:
                store = store or self._first.another()
                if self._watches and not self._coordinates() and self._watch.is_due():
                    self._rhythm.looked()
                    if (term := self._watch.silent_term(store)) is not None:
                        self.coordination = self._coordinate(term) or self.coordination
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + _CHECK_EVERY * self._timeout_s
                    self._rhythm.looked()
                    self._check(store)
            except StoreLost as lost:
                store, self._trouble = None, lost
        self._until_done(store, lambda connected: connected.last_beat(self._node))

    def _give_up_earlier(self, store: JobStore | None, key: str) -> JobStore | None:
        """Frees the thread that awaits an answer which will not come: the coordinator that was asked was deposed."""
        if (earlier := self._asked_at) not in ("", key):
            store, _ = self._until_done(store, lambda connected: connected.publish({earlier: ""}))
        return store

    def _until_look_s(self) -> float:
        if not self._watches or self._coordinates():
            return self._beat_s
        return min(max(self._watch.next_look - time.monotonic(), _LOOK_S), self._beat_s)

    def _check(self, store: JobStore) -> None:
        """A thread that waits on a connection which died unheard misses its key."""
        if self._look_for is not None:
            key, use = self._look_for
            if (text := store.receive(key, 0)) is not None:
                use(text)
