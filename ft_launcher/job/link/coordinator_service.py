"""Runs the coordinator in this agent: one thread reads the inbox, another the beats; both carry out its decisions.

`attempt.py` makes the service on the node that has become the coordinator; the link of that node (`node_link.py`) has
it until the end. Decides nothing about nodes and cycles: that is `coordinator/coordinator.py`, which knows no store.

Threads, both named `ft_coordinator`. The state machine and what is to be written are theirs under one lock:

    `_read_inbox`   blocks on the next message, on a connection of its own; gives messages to the machine.
    `_read_beats`   wakes for each reading of the beats and for each deadline of the machine. It finds lost nodes, a
                    successor, and an inbox that a dead writer holds up. It begins on the connection that its node's
                    link uses, too, so it must not wait in the store.

The link's threads and the agent's read single attributes (`at_work`, `may_beat`, `asked`, `members`), each written in
one step. The link calls `wait_for_leavers`, which blocks, `close` and `remove_records`, at the end.

What a coordinator must survive, and how:

- It slept while another took over. On a store apart from the nodes every read of the inbox and of the beats reads the
  term, too, and the record is written only as the successor of the last one that was read here. A coordinator that
  finds another term, or another record, writes nothing more; it ends, and `why_ended` says why.
- The store does not answer. What could not be written stays in `_todo`, in order. The loops begin again on new
  connections. Once the store has refused all work for the node timeout, this coordinator gives up, since other nodes
  may reach the store and replace it.
- It died between the record and the answers. The successor gives all answers again (`take_over`).
- Another program writes to its keys: see `ForeignCounter`, `_process` and `JobStore.counters`.
- The record's lease ran out, while this node was suspended for instance. The record is written again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ft_launcher.job.coordinator.beat_schedule import BeatReader, read_every
from ft_launcher.job.coordinator.coordinator import Coordinator, Phase
from ft_launcher.job.coordinator.node_messages import (
    NO_CYCLE,
    CycleEnd,
    Ended,
    Formed,
    JoinRequest,
    Left,
    Members,
    RanksEnded,
    Reply,
    Work,
    decode,
    encode,
)
from ft_launcher.job.link.connections import Failures
from ft_launcher.job.link.questions import COUNTERS, MEMBERS, waits_key
from ft_launcher.job.store.job_store import MAX_SENT, ForeignCounter, Head, JobStore
from rank_monitor.contract.errors import ProtocolError, StoreLost
from rank_monitor.contract.wire.complaints import Complaints
from rank_monitor.contract.wire.foreign import whole_number

logger = logging.getLogger(__name__)

BEAT = "coordinator"
"""The counter of the coordinator's beats; the link of its node makes them, as long as it `may_beat`."""
TERM = "term"
"""The key of the term of the coordinator. Read to find that another one has taken over."""
HOST = "host"
"""The value of the key `BEAT` where the coordinator's node hosts the store: nobody needs to watch it. Elsewhere the
value is the id of that node."""
REPLY = "reply"
LONG_S = 3600.0
"""One wait of a thread for a key that may never be written. torch's TCPStore prints two lines when a wait times out."""

# Seconds. A deadline that has already passed must not make the loop spin.
_SHORT_S = 0.01
# Seconds for which `close` waits: for a thread, which may hang in the store and must not hold up the launcher's end;
# for the message that wakes the thread of the inbox, which must be written before the job's keys are removed.
_END_S, _WAKE_S = 0.5, 5.0


class _Superseded(Exception):
    """Another coordinator took over: this one writes nothing more. Ends the thread that finds it out."""


def reply_key(node: str, seq: int) -> str:
    """Returns the key of the answer to a node's arrival number `seq`. Only that node reads it, and removes it then."""
    return f"{REPLY}/{node}/{seq}"


def host_key(cycle: int) -> str:
    """Returns the key of the address of the cycle's store, written by rank 0; empty if the cycle ended before."""
    return f"store/{cycle}"


def stopped_key(cycle: int, rank: int) -> str:
    """Returns the key that says that the ranks of the node with this node rank have ended after a preemption: that node
    writes it, or the coordinator in its place."""
    return f"stopped/{cycle}/{rank}"


def end_key(cycle: int) -> str:
    """Returns the key of the end of a cycle. All members await it, so it is never removed while the attempt lasts."""
    return f"end/{cycle}"


class CoordinatorService:
    """The coordinator at work in this agent, until `close` or the loss of the store or of its term.

    Args:
        store: a connection that it shares with the link of its node: nothing may block on it.
        head: the job's record as it is in the store: this node wrote it to become the coordinator.
        formed: the content of that record.
        machine: the coordinator, on this node.
        beat_s: period of beats (seconds).
        timeout_s: a node without a beat for so many seconds is lost.

    Attributes:
        why_ended: why it does not work any more, or does not get on, in words; for the end of this node.
    """

    def __init__(
        self, store: JobStore, head: Head, formed: Formed, machine: Coordinator, beat_s: float, timeout_s: float
    ) -> None:
        self._me = formed.coordinator
        self._machine = machine
        self._head = head
        self._beat_s = beat_s
        self._timeout_s = timeout_s
        self._formed = formed
        self._hosts = store.hosted_here
        # Read with the messages, to see that another coordinator took over; nobody can where this node hosts the store.
        self._fence: tuple[str, ...] = (TERM,)
        if self._hosts:
            self._fence = ()
        self._term = str(formed.term).encode()
        self._beat_reader = BeatReader(timeout_s, beat_s, period_s=beat_s)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._deadline_changed = threading.Event()
        self._left = threading.Condition(self._lock)
        self._removable = range(machine.read + 1, machine.read + 1)
        """Numbers of messages that the record includes: no successor reads them. The next reading removes them."""
        self._given_up: set[int] = set()
        """Numbers of messages whose writers died. They stay, since a slow writer must find that its place is taken."""
        self._complaints = Complaints(logger.warning)
        self._todo: list[Work] = []
        """What was decided and could not be written yet."""
        self._standing: tuple[int, frozenset[str], frozenset[str]] = (NO_CYCLE, frozenset(), frozenset())
        self.members: Members | None = None
        """The nodes of the current or last cycle, as the nodes can read them; None: no cycle has begun."""
        self._first = store
        self._read_at = time.monotonic()
        """When the beats were read last."""
        # Seconds without a reading after which the node stops beating for this coordinator, so that it is replaced.
        self._slack_s = timeout_s / 2 + beat_s
        self._has_read = False
        self.asked: Sequence[bytes] = ()
        """The values of `questions.COUNTERS` when the beats were last read; empty: they were not."""
        self._is_last = False
        """Whether all other nodes have left, so that this one removes what the job has written."""
        self._lost_any = False
        """Whether any node was lost that may return, and must find the record then."""
        self._threads = [
            threading.Thread(target=self._run, args=arguments, daemon=True, name="ft_coordinator")
            for arguments in ((self._read_inbox, None), (self._read_beats, store))
        ]
        self.why_ended = ""

    def start(self) -> None:
        """Starts the threads. After `take_over` where another coordinator came before."""
        for thread in self._threads:
            thread.start()

    @property
    def at_work(self) -> bool:
        """Whether this is still the coordinator."""
        return not self._closed.is_set()

    @property
    def may_beat(self) -> bool:
        """Whether the node may send the coordinator's beats: the beats of others were read a short time ago.

        A coordinator that hangs, or that cannot read, must be replaced, so its node stops beating for it.
        """
        return time.monotonic() - self._read_at < self._slack_s

    def has_read(self) -> bool:
        """Whether it has read the beats since the last call. The link leaves out a beat for each reading."""
        has_read, self._has_read = self._has_read, False
        return has_read

    def take_over(self, store: JobStore, previous: Formed) -> bool:
        """Sends again, before `start`, what the previous coordinator may not have sent, and counts its node as lost.

        The messages that are in the inbox are read first: the previous coordinator's node may have reported there that
        its ranks succeeded, and then its loss does no harm.

        Args:
            store: the connection that is shared with the link.
            previous: the record of the previous coordinator, which may have been on this node.

        Returns:
            False if another node has taken over meanwhile.

        Raises:
            StoreLost: the store does not answer.
        """
        try:
            with self._lock:
                self._perform(store, self._machine.resend())
                with contextlib.suppress(ForeignCounter):  # which the thread that reads will deal with
                    for text in store.read_inbox(self._machine.read, limit_s=0)[0]:
                        self._perform(store, self._process(text))
                if previous.coordinator != self._me:
                    self._lost_any = True
                    self._perform(store, self._machine.on_lost(previous.coordinator, time.monotonic()))
        except _Superseded:
            return False
        return True

    def wait_for_leavers(self, is_heard: bool, limit_s: float) -> None:
        """Waits until what follows from this node's departure is written, and all others that must read it have left.

        Args:
            is_heard: whether this node's last message is in the inbox, so that it will be processed.
            limit_s: of the wait, in seconds.

        Called by the link, as the last thing before `close`. If the coordinator's node ended at once, the others might
        not read how the job ended: the store ends with this node, or they would elect a successor for nothing.
        """
        with self._left:
            self._left.wait_for(lambda: self._closed.is_set() or self._is_left(is_heard), limit_s)
            all_left = self._machine.phase is Phase.OVER and not self._machine.to_leave and self.at_work
            self._is_last = all_left and not self._lost_any

    def _is_left(self, is_heard: bool) -> bool:
        return (self._machine.has_left or not is_heard) and not self._machine.to_leave

    def remove_records(self, open_store: Callable[[], JobStore]) -> None:
        """Removes all keys of the job if no node is left that reads them. To be called after `close`.

        After the loss of a node nothing is removed: it may return, and finds the record until that is removed with its
        lease. A preempted node does not count: a scheduler usually kills its launcher before that has left.
        """
        if self._is_last and not self._hosts:
            with contextlib.suppress(StoreLost):
                open_store().remove(self._head)

    def close(self) -> None:
        """Ends the work, and the threads if the store answers. Blocks for some seconds at most."""
        self._closed.set()
        self._deadline_changed.set()
        waker = threading.Thread(target=self._wake, daemon=True, name="ft_wake")
        waker.start()
        for thread in self._threads:
            thread.join(_END_S)
        if not self._is_last:
            waker.join(_END_S)  # a thread that is in torch's code when Python ends aborts the process
            return
        waker.join(_WAKE_S)
        self._is_last = not waker.is_alive()  # else it would write into what was removed

    def _wake(self) -> None:
        """Wakes the thread that reads the inbox: one that waits in torch when Python ends would abort the process."""
        with contextlib.suppress(StoreLost):
            self._first.post(encode(Left("", "")))

    def _run(self, loop: Callable[[JobStore], None], store: JobStore | None) -> None:
        """Runs one of the loops until closed or superseded; after a failure again, on a new connection.

        Ends when the work has failed at once, again and again, for as long as a node may be silent: another node may
        reach the store. The end of one thread ends the other, and wakes who waits in `wait_for_leavers`.

        Args:
            loop: `_read_inbox` or `_read_beats`.
            store: a connection to begin with; None: a new one.
        """
        failures = Failures(self._beat_s)
        try:
            while self.at_work and failures.lasted_s < self._timeout_s:
                began = time.monotonic()
                try:
                    store = store or self._first.another()
                    if not self._hosts:
                        self._must_have_term([store.receive(TERM, limit_s=0) or b""])
                    loop(store)
                except StoreLost as lost:
                    store = None
                    self.why_ended = f"the store does not answer the coordinator: {lost}"
                    if failures.failed(began, time.monotonic(), str(lost)):
                        logger.warning("%s; it tries again", self.why_ended)
                    self._closed.wait(min(self._beat_s, 1.0))
        except _Superseded as superseded:
            self.why_ended = str(superseded)
        except Exception as error:  # the thread's edge: without a coordinator the job must end, not wait
            logger.exception("the coordinator of the nodes failed")
            self.why_ended = f"the coordinator of the nodes failed: {error!r}"
        finally:
            self._closed.set()
            with self._left:
                self._left.notify_all()

    def _must_have_term(self, found: list[bytes]) -> None:
        """Raises `_Superseded` if the term in the store, where one was read, is not that of this coordinator."""
        if found and found[0] != self._term:
            raise _Superseded("another coordinator took over")

    def _read_inbox(self, store: JobStore) -> None:
        """Loop of the first thread: waits for messages, and has the machine process them in their order."""
        while self.at_work:
            try:
                texts, fence = store.read_inbox(self._machine.read, LONG_S, self._fence)
            except ForeignCounter as found:
                self._go_on_after(store, found)
                continue
            self._must_have_term(fence)
            with self._lock:
                self._perform(store, [])
                for text in texts:
                    self._perform(store, self._process(text))
            self._deadline_changed.set()

    def _go_on_after(self, store: JobStore, found: ForeignCounter) -> None:
        """Reads on after a counter of the inbox that no node wrote; has the messages around it processed first."""
        self._complaints.about(
            "go on", f"in the rendezvous' store {found}, which no node wrote: messages are read on from there"
        )
        texts = store.rescue(self._machine.read, found.count)
        with self._lock:
            for text in texts:
                self._perform(store, self._process(text))
            self._machine.read = found.count
            self._removable = range(found.count + 1, found.count + 1)
        self._deadline_changed.set()

    def _process(self, text: bytes) -> list[Work]:
        """Has the machine process one text of the inbox. The caller holds the lock.

        A text that no node wrote, or none (its writer took a number and died), counts as read and changes nothing.
        """
        message = None
        if text:
            try:
                message = decode(text)
            except ProtocolError as error:
                self._complaints.about(
                    "record", f"a record of another program in the rendezvous' store is left out: {error}"
                )
        else:
            self._given_up.add(self._machine.read + 1)
        if not isinstance(message, (JoinRequest, Ended, Left)):
            self._machine.read += 1
            return []
        return self._machine.on(message, time.monotonic())

    def _read_beats(self, store: JobStore) -> None:
        """Loop of the second thread: reads all beats each period, and has the machine process the time when it is due.

        One call reads it all: beats, the number of messages that were sent, the counters of questions, and the term. A
        message whose number was taken before the last reading, and which is not there yet, has a writer that died in
        between: its place is given up, so that later messages can be read.

        Messages that the record includes are removed at the reading after it was written: no successor reads them.
        """
        unread_since, sent_before = 0, 0
        next_look = time.monotonic()
        while self.at_work:
            self._deadline_changed.clear()
            with self._lock:
                deadline = min(next_look, self._machine.next_deadline() or next_look)
            self._deadline_changed.wait(max(_SHORT_S, deadline - time.monotonic()))
            if time.monotonic() < next_look:
                self._tick(store)
                continue
            with self._lock:
                if self._hosts:
                    beats = 1
                else:
                    beats = read_every(self._machine.size)
                self._beat_reader.read_every(self._beat_s * beats)
                self._beat_reader.watch(self._machine.nodes - {self._me}, time.monotonic())
                taken = self._machine.read
            more = ("inbox", *COUNTERS, *self._fence)
            counters, (count, *found) = store.counters(self._beat_reader.nodes, more)
            # Without a term the store has lost all, which the next beat finds, and says so.
            self._must_have_term([term for term in found[len(COUNTERS) :] if term])
            self.asked = found[: len(COUNTERS)]
            self._read_at, self._has_read = time.monotonic(), True
            if count:
                sent = whole_number(count, MAX_SENT)
            else:
                sent = taken
            if sent is None or sent < taken:
                store.count_from(taken)
                self._complaints.about(
                    "count", f"the inbox' counter in the rendezvous' store was {count!r:.40}: it was written anew"
                )
            unread = (sent or 0) > taken
            if unread and unread_since == taken:
                store.give_up_missing(taken, sent_before)
            unread_since, sent_before = taken, sent or 0
            now = time.monotonic()
            with self._lock:
                lost = self._beat_reader.read(counters, now)
                next_look = self._beat_reader.next_reading(now)
                self._lost_any |= any(map(self._machine.may_return, lost))
                for node in lost:
                    self._perform(store, self._machine.on_lost(node, now))
                self._perform(store, self._machine.on_tick(now))
                removable = self._removable
            store.remove_messages(number for number in removable if number not in self._given_up)
            with self._lock:  # Only now: where the store did not answer, the next reading removes them.
                self._removable = range(max(removable.stop, self._removable.start), self._removable.stop)

    def _tick(self, store: JobStore) -> None:
        """Has the machine process the time at one of its deadlines, between two readings of the beats.

        The term is read before anything is written. A machine that is suspended has a clock that stands still, so a
        coordinator may be here long after another one took over.

        Raises:
            StoreLost: as `_perform`.
            _Superseded: another coordinator took over; nothing was written.
        """
        with self._lock:
            self._todo += self._machine.on_tick(time.monotonic())
            if self._todo and not self._hosts:
                term = store.receive(TERM, limit_s=0)
                if term:  # Without a term the store has lost all, which the next reading of the beats finds.
                    self._must_have_term([term])
            self._perform(store, [])

    def _perform(self, store: JobStore, work: list[Work]) -> None:
        """Carries out decisions, those that could not be written before included. The caller holds the lock.

        The record is written first. All else goes out in one call, so that a formation costs the store few requests,
        however many nodes there are. Where nodes come or go, the list of members for questions is written with it, and
        each node that has to wait is notified by a key.

        Raises:
            StoreLost: what was not written stays in `_todo` for the next call.
            _Superseded: another coordinator took over; nothing was written.
        """
        self._todo += work
        formed, texts = None, dict[str, str]()
        for item in self._todo:
            match item:
                case Formed():
                    formed = item
                case Reply():
                    texts[reply_key(item.node, item.seq)] = encode(item.answer)
                case CycleEnd():
                    texts |= {host_key(item.cycle): "", end_key(item.cycle): encode(item)}
                case RanksEnded():
                    texts[stopped_key(item.cycle, item.rank)] = "1"
        if formed is not None:
            self._write_record(store, formed)
        standing = self._machine.standing() or self._standing
        if standing != self._standing:
            texts |= {waits_key(node): str(standing[0]) for node in standing[1] - self._standing[1]}
            self.members = self._machine.members()
            texts[MEMBERS] = encode(self.members)
        if texts:
            store.publish(texts)
        self._standing = standing
        self._todo = []
        if self._machine.phase is Phase.OVER or self._machine.has_left:
            self._left.notify_all()

    def _write_record(self, store: JobStore, formed: Formed) -> None:
        """Replaces the job's record by `formed`, for a successor, if the one in the store is still this coordinator's.

        Messages that the record includes may be removed from the inbox afterwards. Where this node hosts the store
        there can be no successor, and nothing is written.
        """
        if not self._hosts:
            formed = replace(formed, attempt=self._formed.attempt, before=self._formed.before)
            text = encode(formed)
            written = store.set_head(text, self._head)
            if written is None and store.head() is None:  # its lease ran out, or it was removed
                self._must_have_term([store.receive(TERM, limit_s=0) or b""])
                logger.warning("the job's record in the rendezvous' store was lost; the coordinator writes it again")
                written = store.set_head(text, None)
            if written is None:
                raise _Superseded("another coordinator took over")
            self._head, self._formed = written, formed
        self._removable = range(self._removable.start, formed.read + 1)
