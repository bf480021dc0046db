"""A node's link to the others: sends its messages, beats, watches the coordinator, and takes what it awaits from it.

Three threads speak to the store, so that the agent never does: two here, one of `awaited.py`, on two lines. The agent
hears of a cycle's end through one descriptor. Decides nothing but when this node must think itself cut off.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ft_launcher.nodes.attempt import AttemptEnded, check, enter_current
from ft_launcher.nodes.awaited import Awaited, Box, RingingBox
from ft_launcher.nodes.coordination import BEAT, HOST, Coordination, end_key, host_key, reply_key
from ft_launcher.nodes.job_store import JobStore
from ft_launcher.nodes.lease import Lease
from ft_launcher.nodes.lines import Lines
from ft_launcher.nodes.messages import Arrive, CycleEnd, How, NodeMessage, Over, Place, decode, encode
from ft_launcher.nodes.rhythm import Rhythm, look_every
from ft_launcher.nodes.silence import own_limit_s
from ft_launcher.nodes.watch import Watch
from rank_monitor.contract.errors import ProtocolError, StoreLost
from rank_monitor.contract.exit_codes import ExitCode

_FIRST_S = 0.5
_LOOK_S = 0.02
_END_S = 0.5
_QUICK = 4
"""A beat that takes more than this part of a period is slow: then none is left out."""
_LOOK_EVERY = 4
"""Times the node timeout: how often an awaited key is looked for beside the thread that waits for it."""


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
        coordinate: becomes the coordinator in place of the one of the given term (0: of a new attempt), if it can, on
            a connection that it shares with this link.
        lease: renewed by each beat that is answered.
        beat_s, timeout_s: period of beats, and when a silent node is lost.
    """

    def __init__(
        self,
        node: str,
        store: JobStore,
        coordinate: Callable[[int, JobStore], Coordination | None],
        lease: Lease,
        beat_s: float,
        timeout_s: float,
    ) -> None:
        self.coordination: Coordination | None = None
        self._node, self._coordinate, self._beat_s, self._timeout_s = node, coordinate, beat_s, timeout_s
        self._lease, self._leased_at = lease, lease.now()
        self.attended = False
        """Whether the agent takes ends as they come: then one that it does not take means that it stands still."""
        self._hosts = store.hosted_here
        self._quiet = threading.Event()
        self._outbox: queue.SimpleQueue[NodeMessage | dict[str, str] | None] = queue.SimpleQueue()
        self._heard_at = self._checked_at = time.monotonic()
        self._next_look = self._heard_at + _LOOK_EVERY * timeout_s
        self._watches = False
        self._watch = Watch(beat_s, timeout_s)
        self._rhythm = Rhythm()
        self._find_coordinator(store)
        self._lines = Lines(store, min(beat_s, 1.0))
        self._answers, self._hosts_of_cycles, self._ends = Box(ours=True), Box(), RingingBox()
        self._awaited = Awaited(self._lines)
        self._speaker = threading.Thread(target=self._speak, daemon=True, name="ft_node_speak")
        self._beater = threading.Thread(target=self._beat, daemon=True, name="ft_node_beat")
        self._speaker.start()
        self._beater.start()

    def _find_coordinator(self, store: JobStore) -> None:
        """The host of the store coordinates; on a store apart from the nodes, the node that opens the attempt."""
        others_s = self._timeout_s if store.has_host() else _FIRST_S
        deadline = time.monotonic() + others_s
        entered = enter_current(store)
        while not entered and store.may_have_host and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            entered = enter_current(store)
        while not entered:
            self.coordination = self._coordinate(0, store)
            entered = enter_current(store)
        self._watches = store.receive(BEAT, _FIRST_S) != HOST.encode()

    def fileno(self) -> int:
        """Readable when a cycle's end was told."""
        return self._ends.fileno()

    def take_end(self, cycle: int) -> CycleEnd | None:
        """The end of this cycle, once it was told."""
        with contextlib.suppress(ProtocolError):
            end = decode(self._ends.take(end_key(cycle), 0) or b"")
            return end if isinstance(end, CycleEnd) else None
        return None

    def send(self, message: NodeMessage) -> None:
        """Sends a message to the coordinator; returns at once."""
        self._outbox.put(message)

    def ask(self, arrival: Arrive) -> None:
        """Sends an arrival, whose answer `answer` gives."""
        self._node = arrival.node
        self._awaited.expect(reply_key(arrival.node, arrival.seq), self._answers)
        self._outbox.put(arrival)

    def answer(self, seq: int, limit_s: float) -> bytes | None:
        """The answer to arrival number `seq`; None: none came within `limit_s`."""
        return self._answers.take(reply_key(self._node, seq), limit_s)

    def host_of_cycle(self, cycle: int, limit_s: float) -> bytes | None:
        """Where rank 0 hosts the cycle's store, empty when the cycle ended before; None: unknown after `limit_s`."""
        return self._hosts_of_cycles.take(host_key(cycle), limit_s)

    def announce(self, cycle: int, host: str) -> None:
        """Tells the others where this node hosts the cycle's store; returns at once."""
        self._outbox.put({host_key(cycle): host})

    def another_store(self) -> Any:
        """torch's store of a new connection, which the caller lets go of soon.

        Raises:
            StoreLost: there can be none.
        """
        return self._lines.rest.open().another().raw

    def entered(self, place: Place, deputies: int, hosted_by_user: bool = False) -> None:
        """This node takes part in a cycle now. Of its members, `deputies` watch the coordinator closely.

        `hosted_by_user`: the cycle's store is known to all from the command line.
        """
        self._watch.period_s = look_every(place.nodes) * self._beat_s if place.deputy else None
        deputies = 0 if place.deputy or not self._watches else min(deputies, place.nodes - 1)
        self._rhythm.serve(place.rank, place.nodes, deputies)
        self._begin_lease()
        if place.rank != 0 and not hosted_by_user:
            self._awaited.expect(host_key(place.cycle), self._hosts_of_cycles)
        self._awaited.expect(end_key(place.cycle), self._ends)

    def _begin_lease(self) -> None:
        """Lets ranks run from the last answered beat on. A node that stood still until now has none: it makes one."""
        now, key = self._lease.now(), self._beat_key()
        if now > self._leased_at + 2 * self._beat_s:
            with contextlib.suppress(StoreLost):
                if key:
                    self._lines.once(lambda store: store.beat(key), "beats")
                if key or self._hosts:
                    self._leased_at = now
        self._lease.begin(self._leased_at)

    def was_deposed(self) -> bool:
        """Whether this node was the coordinator and another has taken over; told once."""
        deposed = self._watches and self.coordination is not None and not self.coordination.at_work
        if deposed:
            self.coordination = None
        return deposed

    def trouble(self) -> Exception | None:
        """What went wrong with the store last; None while it answers."""
        return self._lines.trouble

    def _coordinates(self) -> bool:
        """Whether this node is the coordinator."""
        return self.coordination is not None and self.coordination.at_work

    def cut(self, now: float) -> Cut | None:
        """Whether this node is cut off. To be asked four times a beat; time in which nobody asked does not count."""
        if self._hosts:
            failed = self.coordination is not None and not self.coordination.at_work and not self._lines.closed.is_set()
            return Cut(self.coordination.why_ended, False) if self.coordination is not None and failed else None
        overslept = max(0.0, now - self._checked_at - 2 * self._beat_s)
        self._checked_at, self._heard_at = now, min(now, self._heard_at + overslept)
        limit_s = own_limit_s(self._timeout_s, self._beat_s)
        if refused := self._lines.failing_for(limit_s):
            return Cut(f"the rendezvous' store has refused this node's work for {limit_s:g} s ({refused})", False)
        if now - self._heard_at < limit_s:
            return None
        why = f": {self._lines.trouble}" if self._lines.trouble else ""
        return Cut(f"the rendezvous' store gave no answer for {limit_s:g} s{why}", "unreachable" in why)

    def wake(self, now: float) -> None:
        """The agent stood still until now: the time in which nothing was answered begins anew."""
        self._heard_at = self._checked_at = now

    def close(self, last: NodeMessage, limit_s: float) -> None:
        """Sends a last message and ends; a coordinator waits for the others to leave first, up to `limit_s`.

        After that message this node writes nothing more: whoever reads it last removes all that the job has written.
        """
        if not self._coordinates():
            self._stop_beats()
        self._outbox.put(last)
        self._outbox.put(None)
        self._speaker.join(min(limit_s, self._timeout_s if self._lines.trouble is None else self._beat_s))
        if self.coordination is not None:
            self.coordination.wait_for_leavers(limit_s)
            self._stop_beats()
            self.coordination.close()
            self.coordination.remove_records(self._lines.rest.open)
        self._lines.closed.set()
        self._awaited.close()
        if self._lines.trouble is None:  # a thread that waits in torch when Python ends would abort the process
            threading.Thread(target=self._wake, daemon=True, name="ft_wake").start()
            for thread in (self._speaker, self._beater, self._awaited.thread):
                thread.join(_END_S)

    def _stop_beats(self) -> None:
        self._quiet.set()
        self._beater.join(_END_S)

    def _wake(self) -> None:
        """Lets the thread go that waits for an answer which will not come; a cycle's end comes by itself."""
        with contextlib.suppress(StoreLost):
            self._awaited.let_go(self._lines.rest.open(), self._answers)

    # The threads.

    def _beat(self) -> None:
        """Beats, and does nothing else: what others do on the line comes between two beats once at most."""
        took_s, counts = 0.0, dict[str, int]()
        while not self._quiet.is_set():
            sent_at, leased_at, key = time.monotonic(), self._lease.now(), self._beat_key()
            if self._hosts and not key:  # nobody beats for the store's host: whoever reaches the store, reaches it
                self._renew(leased_at)
            if self._rhythm.next_is_made(took_s < self._beat_s / _QUICK) and key:
                with contextlib.suppress(StoreLost):
                    count = self._lines.once(lambda store: store.beat(key), "beats")  # noqa: B023 (called at once)
                    took_s = time.monotonic() - sent_at
                    self._heard_at, self._lines.trouble = sent_at, None
                    self._renew(leased_at)
                    if 0 < count <= counts.get(key, 0):  # the store has lost it, or another attempt has removed it
                        self._lines.once(self._check_attempt, "the look at the job's record")
                    counts[key] = count
            self._quiet.wait(self._beat_s)

    def _renew(self, sent_at: float) -> None:
        """The ranks may run on, unless their cycle has ended for all nodes and the agent does not take note of it."""
        self._leased_at = sent_at
        if not (self.attended and self._ends.untaken_s(time.monotonic()) > self._beat_s):
            self._lease.renew(sent_at)

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
        """Sends messages as they come; in between looks after the coordinator and what is awaited."""
        while True:
            try:
                message = self._outbox.get(timeout=self._until_look_s())
            except queue.Empty:
                with contextlib.suppress(StoreLost):
                    self._look()
                continue
            if message is None:
                break
            if isinstance(message, dict):
                texts = message
                self._lines.until_done(lambda store: store.publish(texts), "messages")  # noqa: B023
            else:
                self._post(message)

    def _post(self, message: NodeMessage) -> None:
        text = encode(message)
        self._lines.until_done(lambda store: store.post(text), "messages")
        if isinstance(message, Arrive):  # an answer to an earlier one will not come: who was asked was deposed
            key = reply_key(message.node, message.seq)
            self._lines.until_done(lambda store: self._awaited.let_go(store, self._answers, before=key), "messages")

    def _look(self) -> None:
        if self._watches and not self._coordinates() and self._watch.is_due():
            self._rhythm.looked()
            self._lines.once(self._look_after_coordinator, "the watch of the coordinator")
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_EVERY * self._timeout_s
            self._rhythm.looked()
            self._lines.once(self._look_for_awaited, "the look for answers")

    def _look_after_coordinator(self, store: JobStore) -> None:
        if (term := self._watch.silent_term(store)) is not None:
            try:
                self.coordination = self._coordinate(term, store) or self.coordination
            except AttemptEnded as ended:
                self._hear(store, ended.over)

    def _look_for_awaited(self, store: JobStore) -> None:
        self._awaited.look(store)

    def _check_attempt(self, store: JobStore) -> None:
        try:
            check(store)
        except AttemptEnded as ended:
            self._hear(store, ended.over)

    def _hear(self, store: JobStore, over: Over) -> None:
        """Nobody will tell this node the end of its attempt any more: it is what the awaited keys are given."""
        how = (How.SUCCEEDED if over.exit_code == ExitCode.OK else How.STOP).value

        def end(key: str) -> str:
            return encode(CycleEnd(int(key.rpartition("/")[2]), how, over.reason, over.exit_code))

        self._awaited.let_go(store, self._hosts_of_cycles)
        self._awaited.let_go(store, self._ends, text=end)
        self._awaited.let_go(store, self._answers, text=lambda key: encode(over))

    def _until_look_s(self) -> float:
        if not self._watches or self._coordinates():
            return self._beat_s
        return min(max(self._watch.next_look - time.monotonic(), _LOOK_S), self._beat_s)
