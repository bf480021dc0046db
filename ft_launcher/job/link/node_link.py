"""A node's link to the others: sends its messages, beats, has the coordinator watched, and receives what it awaits.

`rendezvous/handler.py` makes one where a job has several nodes. Knows no ranks and decides nothing about a cycle: that
is the coordinator's. Two decisions are the link's own: when this node is cut off (`cut`), and when it tries to follow a
coordinator that is lost.

The life of a link:

    1. `__init__` joins the current attempt of the job, or opens one; then this node is the coordinator, too.
    2. `ask` sends an arrival; `answer` waits for this node's place in the next cycle.
    3. `entered`: the lease begins, and the end of that cycle is awaited from now on.
    4. While the cycle runs: `fileno` is readable when the cycle has ended, `pop_end` says how; `cut` says whether this
       node may have been counted as lost. Then 2 again.
    5. `close` sends the last message, and ends the threads.

Threads, so that the agent never blocks on the store:

    ft_node_speak   sends messages in order. In between it reads the coordinator's beats on a store apart from the
                    nodes, looks for awaited keys and for questions. Uses the shared connection.
    ft_node_beat    makes beats and renews the lease, and nothing else: so nothing but an operation of another thread,
                    on the same connection, can delay a beat.
    ft_node_await   of `key_waiter.py`: waits for one key after the other, on a connection of its own.

On the coordinator's node two threads of `coordinator_service.py` come to these; one of them uses the shared connection.
Public methods are called in the agent's thread, or in a thread in which the agent makes a call that may block
(`agent/ending_signal.py`). `__init__`, `answer`, `host_of_cycle`, `entered` and `close` may block there; no other does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable

from ft_launcher.job.coordinator.beat_schedule import DEPUTIES, BeatSchedule, own_limit_s, read_every
from ft_launcher.job.coordinator.node_messages import (
    Answer,
    CycleEnd,
    JobOver,
    JoinRequest,
    NodeMessage,
    RankAssigned,
    decode,
    decode_as,
    encode,
)
from ft_launcher.job.link.attempt import (
    AttemptEnded,
    CoordinatorWatch,
    NodeSettings,
    become_coordinator,
    check,
    enter_current,
)
from ft_launcher.job.link.connections import Connections
from ft_launcher.job.link.coordinator_link import Cut, CutReason
from ft_launcher.job.link.coordinator_service import (
    BEAT,
    HOST,
    CoordinatorService,
    end_key,
    host_key,
    reply_key,
    stopped_key,
)
from ft_launcher.job.link.key_waiter import Awaited, PollableValueQueue, ValueQueue
from ft_launcher.job.link.lease import Lease
from ft_launcher.job.link.questions import Questions
from ft_launcher.job.store.job_store import JobStore
from rank_monitor.contract.errors import ProtocolError, StoreLost, one_line

logger = logging.getLogger(__name__)

# Where no host of the store is known yet, another node gets this long to open the attempt before this one does: with
# c10d the node that hosts the store should coordinate, and it may have started a moment later.
_FIRST_S = 0.5
# The record of a new attempt, a due look at the coordinator and an error of the store while the last message is sent
# are polled, since none of them has something to wait for.
_LOOK_S = 0.02
# A thread that hangs in the store delays the end of the launcher by no more than this (seconds).
_END_S = 0.5
_QUICK = 4
"""A beat that takes more than a period divided by this is slow: then none is left out, since each may come late."""
_LOOK_EVERY = 4
"""In node timeouts: how often an awaited key is read by another thread than the one that waits for it. Seldom: the look
costs a beat, and finds something only where a connection died unnoticed."""
_QUESTIONS_EVERY = 2
"""In beats: how often a node looks whether another asks something; a beat is left out for it."""


class NodeLink:
    """The link of one node. Blocks until the job has a coordinator, which this node may become.

    Args:
        node: its id.
        store: a connection to begin with. The link owns it from now on.
        settings: the rules and times of the job, which this node follows if it becomes the coordinator.
        lease: renewed by each beat that is answered.

    Attributes:
        coordination: the coordinator's work, if this node is the coordinator or was it until `was_superseded` said so.
        questions: what the nodes ask each other.

    Raises:
        StoreLost: the store does not answer.
    """

    def __init__(self, node: str, store: JobStore, settings: NodeSettings, lease: Lease) -> None:
        self.coordination: CoordinatorService | None = None
        self._node = node
        self._settings = settings
        self._beat_s = settings.beat_s
        self._timeout_s = settings.timeout_s
        self._lease = lease
        self._leased_at = lease.now()
        """When the last answered beat was sent, by the lease's clock."""
        self.is_polled = False
        """See `CoordinatorLink.is_polled`."""
        self.hosts_store = self._hosts = store.hosted_here
        self._quiet = threading.Event()
        """Ends the beats."""
        self._outbox: queue.SimpleQueue[NodeMessage | dict[str, str] | None] = queue.SimpleQueue()
        """For `ft_node_speak`: messages to the coordinator, texts to publish by key, None for the end."""
        # When the last answered beat was sent, moved forward by the time for which `cut` was not called.
        self._answered_at = self._checked_at = time.monotonic()
        self._next_look = self._answered_at + _LOOK_EVERY * self._timeout_s
        self._watches = False
        """Whether the store is apart from the nodes: then the coordinator can be lost alone, and is watched."""
        self._watch = CoordinatorWatch(self._beat_s, self._timeout_s)
        self._beat_schedule = BeatSchedule()
        self._find_coordinator(store)
        self._connections = Connections(store, pause_s=min(self._beat_s, 1.0))
        self.questions = Questions(self._connections, look_s=_QUESTIONS_EVERY * self._beat_s)
        self._answers = ValueQueue(ours=True)
        self._hosts_of_cycles = ValueQueue()
        self._ends = PollableValueQueue()
        self.stopped = PollableValueQueue()
        """The keys by which other nodes report that their ranks have ended, as `await_ranks` expects them."""
        self._failed: Cut | None = None
        self._awaited = Awaited(self._connections, on_failure=self._has_failed)
        self._speaker = threading.Thread(target=self._at_edge, args=(self._speak,), daemon=True, name="ft_node_speak")
        self._beater = threading.Thread(target=self._at_edge, args=(self._beat,), daemon=True, name="ft_node_beat")
        self._speaker.start()
        self._beater.start()

    def _find_coordinator(self, store: JobStore) -> None:
        """Joins the current attempt of the job; opens one, and becomes its coordinator, where there is none.

        Where a node hosts the store, that node is to be the coordinator: if it is lost, the store is lost with it
        anyway. So any other node waits before it opens an attempt: for the node timeout where the store says that a
        node hosts it, else for a moment. On etcd or files nobody waits: the first node to write the record wins.
        """
        if store.has_host():
            others_s = self._timeout_s
        else:
            others_s = _FIRST_S
        deadline = time.monotonic() + others_s
        entered = enter_current(store)
        while not entered and store.may_have_host and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            entered = enter_current(store)
        while not entered:
            self.coordination = become_coordinator(self._node, self._settings, store, lost_term=0)
            entered = enter_current(store)
        self._watches = store.receive(BEAT, _FIRST_S) != HOST.encode()

    def fileno(self) -> int:
        """Returns a descriptor that is readable when the end of a cycle was received."""
        return self._ends.fileno()

    def pop_end(self, cycle: int) -> CycleEnd | None:
        """Returns the end of this cycle; None if it was not received, or cannot be read. Does not block."""
        with contextlib.suppress(ProtocolError):
            return decode_as(CycleEnd, self._ends.pop(end_key(cycle), limit_s=0) or b"")
        return None

    def send(self, message: NodeMessage) -> None:
        """Sends a message to the coordinator; returns at once."""
        self._outbox.put(message)

    def ask(self, arrival: JoinRequest) -> None:
        """Sends an arrival; `answer` returns the reply to it. Returns at once."""
        self._node = arrival.node
        self.questions.arrives(arrival.node, arrival.cycle)
        self._awaited.expect(reply_key(arrival.node, arrival.seq), self._answers)
        self._outbox.put(arrival)

    def answer(self, seq: int, limit_s: float) -> Answer | None:
        """Waits up to `limit_s` seconds for the answer to arrival number `seq`; None if none arrived.

        Raises:
            ProtocolError: what arrived is none.
        """
        text = self._answers.pop(reply_key(self._node, seq), limit_s)
        if text is None:
            return None
        answer = decode(text)
        if not isinstance(answer, (RankAssigned, JobOver)):
            raise ProtocolError(f"it is a {type(answer).__name__}")
        return answer

    def host_of_cycle(self, cycle: int, limit_s: float) -> bytes | None:
        """Waits up to `limit_s` seconds for the address of the cycle's store; None if it did not arrive, empty if the
        cycle ended before."""
        return self._hosts_of_cycles.pop(host_key(cycle), limit_s)

    def announce(self, cycle: int, host: str) -> None:
        """Publishes the address at which this node hosts the cycle's store. Returns at once."""
        self._outbox.put({host_key(cycle): host})

    def ranks_ended(self, place: RankAssigned) -> None:
        """Publishes that the ranks of this node have ended after a preemption of their cycle. Returns at once.

        A preempted node that hosts the ranks' store or the job's stays until it has read this of all others.
        """
        self._outbox.put({stopped_key(place.cycle, place.rank): "1"})

    def await_ranks(self, place: RankAssigned) -> str:
        """Begins to wait until the ranks of the other nodes have ended, too; returns the key that `stopped` has last.

        Not to be called where the node of `place` was alone. Returns at once.
        """
        keys = [stopped_key(place.cycle, rank) for rank in range(place.nodes) if rank != place.rank]
        for key in keys:
            self._awaited.expect(key, self.stopped)
        return keys[-1]

    def entered(self, place: RankAssigned, hosted_by_user: bool = False) -> None:
        """Notes that this node takes part in a cycle: begins the lease, and awaits the cycle's end.

        `hosted_by_user`: the cycle's store is known to all from the command line. Else its address is awaited first:
        keys must be awaited in the order in which they are written.
        """
        self.questions.has_place()
        if place.deputy:
            self._watch.period_s = read_every(place.nodes) * self._beat_s
        else:
            self._watch.period_s = None
        if place.deputy or not self._watches:
            deputies = 0
        else:
            deputies = min(DEPUTIES, place.nodes - 1)
        self._beat_schedule.serve(place.rank, place.nodes, deputies)
        self._begin_lease()
        if place.rank != 0 and not hosted_by_user:
            self._awaited.expect(host_key(place.cycle), self._hosts_of_cycles)
        self._awaited.expect(end_key(place.cycle), self._ends)

    def _begin_lease(self) -> None:
        """Begins the lease at the last answered beat. A node that stood still until now makes a beat first.

        Otherwise the lease of such a node could expire just after it began, and its new ranks would be ended.
        """
        now, key = self._lease.now(), self._beat_key()
        if now > self._leased_at + 2 * self._beat_s:
            with contextlib.suppress(StoreLost):
                if key:
                    self._connections.once(lambda store: store.beat(key), "beats")
                if key or self._hosts:
                    self._leased_at = now
        self._lease.begin(self._leased_at)

    def was_superseded(self) -> bool:
        """Whether this node was the coordinator and another has taken over. Returns True once.

        The node then takes another id: the new coordinator ignores messages under the old one.
        """
        superseded = self._watches and self.coordination is not None and not self.coordination.at_work
        if superseded:
            self.coordination = None
        return superseded

    def trouble(self) -> Exception | None:
        """Returns the last error of the store; None while it answers."""
        return self._connections.trouble

    def _coordinates(self) -> bool:
        """Whether this node is the coordinator."""
        return self.coordination is not None and self.coordination.at_work

    def cut(self, now: float) -> Cut | None:
        """Returns whether and why this node is cut off: the others may count it as lost, so its ranks must end.

        To be called four times a beat while ranks run. A time without calls does not count: the launcher stood still,
        and nobody knows whether the store would have answered. The lease covers that case.

        The node that hosts the store cannot lose it. It is cut off where its coordinator has given up.
        """
        if self._failed is not None:
            return self._failed
        if self._hosts:
            if self.coordination is None or self.coordination.at_work or self._connections.closed.is_set():
                return None
            return Cut(CutReason.REFUSED, self.coordination.why_ended)
        overslept = max(0.0, now - self._checked_at - 2 * self._beat_s)
        self._checked_at = now
        self._answered_at = min(now, self._answered_at + overslept)
        limit_s = own_limit_s(self._timeout_s, self._beat_s)
        refused = self._connections.failing_for(limit_s)
        if refused:
            return Cut(
                CutReason.REFUSED, f"the rendezvous' store has refused this node's work for {limit_s:g} s ({refused})"
            )
        if now - self._answered_at < limit_s:
            return None
        reason = f"the rendezvous' store gave no answer for {limit_s:g} s"
        if self._connections.trouble:
            reason += f": {self._connections.trouble}"
        if self._connections.has_no_route():
            return Cut(CutReason.NO_ROUTE, reason)
        return Cut(CutReason.NO_ANSWER, reason)

    def wake(self, now: float) -> None:
        """Restarts the time without an answer, after the agent stood still and its ranks were ended for it."""
        self._answered_at = self._checked_at = now

    def close(self, last: NodeMessage, limit_s: float) -> None:
        """Sends a last message and ends; a coordinator waits for the other nodes to leave first, up to `limit_s`.

        After that message this node writes nothing more, since the last node that leaves removes all that the job has
        written. So first of all beats and questions end; the coordinator's node goes on beating, for it must not be
        replaced while it waits. Blocks for `limit_s` (seconds), on the coordinator's node for twice that, and longer
        where the store does not answer. Where the store refuses the message it is tried again for a beat only.
        """
        self.questions.close()
        if not self._coordinates():
            self._stop_beats()
        self._outbox.put(last)
        self._outbox.put(None)
        self._await_sent(limit_s)
        if self.coordination is not None:
            self.coordination.wait_for_leavers(is_heard=not self._speaker.is_alive(), limit_s=limit_s)
            self._stop_beats()
            self.coordination.close()
            self.coordination.remove_records(self._connections.shared.open)
        self._connections.closed.set()
        self._awaited.close()
        if self._connections.trouble is None:  # a thread that is in torch's code when Python ends aborts the process
            waker = threading.Thread(target=self._wake, daemon=True, name="ft_wake")
            waker.start()
            for thread in (self._speaker, self._beater, self._awaited.thread, waker):
                thread.join(_END_S)

    def _await_sent(self, limit_s: float) -> None:
        """Waits until all messages are in the store: `limit_s` (seconds) and the node timeout at most.

        From the first error of the store on, also one from before, it waits for one beat: the host of the store may
        have ended, and a scheduler kills a launcher that takes long to end.
        """
        now = time.monotonic()
        deadline, tries_until = now + min(limit_s, self._timeout_s), math.inf
        while self._speaker.is_alive() and now < min(deadline, tries_until):
            if self._connections.trouble is not None:
                tries_until = min(tries_until, now + self._beat_s)
            self._speaker.join(min(_LOOK_S, max(0.0, min(deadline, tries_until) - now)))
            now = time.monotonic()

    def _stop_beats(self) -> None:
        """Ends the thread that beats. One that hangs in the store is left behind."""
        self._quiet.set()
        self._beater.join(_END_S)

    def _wake(self) -> None:
        """Ends the waits of `ft_node_await` by writing the keys that it awaits. A thread of its own: it may block.

        The wait for a cycle's end is not ended here: the coordinator writes that key, and other nodes read it.
        """
        with contextlib.suppress(StoreLost):
            store = self._connections.shared.open()
            self._awaited.release(store, self._answers)
            self._awaited.release(store, self.stopped)

    # The threads.

    def _at_edge(self, loop: Callable[[], None]) -> None:
        """Runs the loop of a thread. An unexpected exception of the loop cuts the node off.

        A node of which a thread has ended would send or receive nothing any more, and nobody would notice.
        """
        try:
            loop()
        except Exception as error:
            self._has_failed(error)

    def _has_failed(self, error: Exception) -> None:
        """Called by a thread of the link that ends with an unexpected exception, within its `except` block."""
        logger.exception("a thread of the link to the other nodes has failed")
        self._failed = Cut(CutReason.NO_ANSWER, f"the link to the other nodes has failed: {one_line(error)}")

    def _beat(self) -> None:
        """Loop of `ft_node_beat`: a beat each period, of which `BeatSchedule` leaves some out.

        The lease is renewed from the time at which the beat was sent, and not from that of the answer: other nodes may
        have read the new count at any time in between.
        """
        took_s, counts = 0.0, dict[str, int]()
        while not self._quiet.is_set():
            sent_at, leased_at, key = time.monotonic(), self._lease.now(), self._beat_key()
            if self._hosts and not key:  # a node that reaches the store reaches its host
                self._renew(leased_at)
            if self._beat_schedule.next_is_made(quick=took_s < self._beat_s / _QUICK) and key:
                with contextlib.suppress(StoreLost):
                    count = self._connections.once(lambda store: store.beat(key), "beats")  # noqa: B023 (called at once)
                    took_s = time.monotonic() - sent_at
                    self._answered_at, self._connections.trouble = sent_at, None
                    self._renew(leased_at)
                    # A smaller count than before: the store has lost it, or another attempt has removed it.
                    if 0 < count <= counts.get(key, 0):
                        self._connections.once(self._check_attempt, "the look at the job's record")
                    counts[key] = count
            self._quiet.wait(self._beat_s)

    def _renew(self, sent_at: float) -> None:
        """Renews the lease, unless the cycle has ended and the agent has not read its end for longer than a beat.

        An agent that should read the end and does not hangs. Its ranks must not run on while the others go on without
        them, so the lease runs out and the monitors end them.
        """
        self._leased_at = sent_at
        if not (self.is_polled and self._ends.unread_s(time.monotonic()) > self._beat_s):
            self._lease.renew(sent_at)

    def _beat_key(self) -> str:
        """Returns whose counter to increase: this node's, or the coordinator's where it runs here; empty for none.

        The coordinator's node has no counter of its own. It makes no beats while its coordinator hangs: the others
        replace that coordinator, count its node as lost, and this node must be cut off before. Where this node hosts
        the store nobody watches it, so it makes no beats at all.
        """
        if self.coordination is None or not self.coordination.at_work:
            return self._node
        if self._hosts:
            return ""
        if self.coordination.has_read():
            self._beat_schedule.note_operation()
            self.questions.note(self.coordination.asked)
        if self.coordination.may_beat:
            return BEAT
        return ""

    def _speak(self) -> None:
        """Loop of `ft_node_speak`: sends messages as they arrive, and looks at what is due where none arrives.

        A message is tried again until the store has it or the link is closed, so messages stay in order.
        """
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
                self._connections.until_done(lambda store: store.publish(texts), "messages")  # noqa: B023
            else:
                self._post(message)

    def _post(self, message: NodeMessage) -> None:
        """Puts a message into the coordinator's inbox; blocks until the store has it, or the link is closed."""
        text = encode(message)
        self._connections.until_done(lambda store: store.post(text), "messages")
        # No answer to an earlier arrival will come: the coordinator that was to give it was replaced.
        if isinstance(message, JoinRequest):
            key = reply_key(message.node, message.seq)
            self._connections.until_done(
                lambda store: self._awaited.release(store, self._answers, before=key), "messages"
            )

    def _look(self) -> None:
        """Makes each look that is due; a later beat is left out for each, so that an idle job makes no more operations.

        Raises:
            StoreLost: the store does not answer; the looks that were left out come later.
        """
        if self._watches and not self._coordinates() and self._watch.is_due():
            self._beat_schedule.note_operation()
            self._connections.once(self._look_after_coordinator, "the watch of the coordinator")
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_EVERY * self._timeout_s
            self._beat_schedule.note_operation()
            self._connections.once(self._look_for_awaited, "the look for answers")
        if self.questions.is_due():
            self._beat_schedule.note_operation()
            self.questions.check()

    def _look_after_coordinator(self, store: JobStore) -> None:
        """Reads the coordinator's beats; tries to take over where they have stopped for the node timeout."""
        term = self._watch.lost_term(store)
        self.questions.note(self._watch.asked)
        if term is None:
            return
        try:
            found = become_coordinator(self._node, self._settings, store, lost_term=term)
            self.coordination = found or self.coordination
        except AttemptEnded as ended:
            self._publish_end(store, ended.over)

    def _look_for_awaited(self, store: JobStore) -> None:
        """Reads the awaited keys, and whether the job's record is still that of this node's attempt."""
        self._awaited.check(store)
        # The thread that beats notices another attempt by a counter that was removed. With torch 2.6, which cannot list
        # keys, no counter is removed, so the record is read here.
        self._check_attempt(store)

    def _check_attempt(self, store: JobStore) -> None:
        """Ends this node's waits where its attempt was replaced by another, or its record is lost."""
        try:
            check(store)
        except AttemptEnded as ended:
            self._publish_end(store, ended.over)

    def _publish_end(self, store: JobStore, over: JobOver) -> None:
        """Writes the end of this node's attempt to the keys that this node awaits: no coordinator will write them.

        So `answer` and `pop_end` return that end, as if a coordinator had sent it.
        """

        def end(key: str) -> str:
            return encode(CycleEnd(int(key.rpartition("/")[2]), over.end_reason, over.reason, over.exit_code))

        self._awaited.release(store, self._hosts_of_cycles)
        self._awaited.release(store, self._ends, text=end)
        self._awaited.release(store, self._answers, text=lambda key: encode(over))

    def _until_look_s(self) -> float:
        """Returns how many seconds `ft_node_speak` waits for a message before it looks at what is due."""
        if not self._watches or self._coordinates():
            return self._beat_s
        return min(max(self._watch.next_look - time.monotonic(), _LOOK_S), self._beat_s)
