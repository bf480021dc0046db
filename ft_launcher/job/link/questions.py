"""What the agents of a job ask each other while it runs, through the job's store. Decides nothing.

Used by `agent/hang_exchange.py`, which asks where the ranks of all nodes are, and by `tools/status/job_nodes.py`, for
the page of the job and `ft_launcher stacks --all-nodes`. What questions and answers contain is theirs.

    1. The node that asks increases the counter of a topic: the new count is the number of the question.
    2. Each node reads the counters of all topics in place of every second beat. Coordinator and deputies read them with
       the beats. So a question costs nothing while nobody asks, and reaches each node within two beats.
    3. A node that finds a larger count calls `Questions.on_question`, and the user of the topic on that node answers.
    4. The answer is at a key of its own, by topic and node rank, and contains the number of the question. The answer to
       the next question replaces it.
    5. The node that asked reads the answers of the nodes of the cycle, again and again until it has what it needs.

Nothing is tried again here, and no failure counts as trouble of this node's link: only the node that asks is concerned.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from ft_launcher.job.coordinator.node_messages import Members, RankAssigned, decode_as
from ft_launcher.job.link.connections import Connections
from ft_launcher.job.store.job_store import MAX_SENT, JobStore
from rank_monitor.contract.errors import ProtocolError, StoreLost
from rank_monitor.contract.wire.foreign import whole_number

MEMBERS = "members"
"""The key of the coordinator's `Members`."""
_END_S = 0.5
"""How long `close` waits for an operation that is under way (seconds)."""
_T = TypeVar("_T")


class Topic(str, Enum):
    """What can be asked. The values are parts of keys in the store."""

    __str__ = str.__str__

    STACKS = "stacks"
    """Where each rank is, and how far in its process groups."""
    RANKS = "ranks"
    """A line about each rank."""
    HANG = "hang"
    """Where each rank is, and for how long it has done nothing (`agent/hang_exchange.py`)."""


def counter_key(topic: Topic) -> str:
    """Returns the key that counts the questions about a topic."""
    return f"asked_{topic}"


COUNTERS = tuple(counter_key(topic) for topic in Topic)
"""The keys that count questions, in the order in which `Questions.note` expects their values."""


def answer_key(topic: Topic, rank: int) -> str:
    """Returns the key of the answer of the node with this node rank."""
    return f"{topic}/{rank}"


def waits_key(node: str) -> str:
    """Returns the key that exists once the coordinator has let a node wait while the others run.

    Its value is the number of the cycle that the others run.
    """
    return f"waits/{node}"


def others_of(members: Members, place: RankAssigned | None) -> dict[int, str]:
    """Returns the names of the other nodes in a cycle by node rank; `place` is that of this node, if it has one."""
    names = {rank: name for rank, name in enumerate(members.active) if rank not in members.gone}
    if place is not None and place.cycle == members.cycle:
        names.pop(place.rank, None)
    return names


class Questions:
    """One node's end. Any thread may ask and answer; one operation on the store runs at a time.

    Threads: `ft_node_speak` calls `is_due` and `check`. Where this node reads beats anyway, `note` is called with what
    was read: on the coordinator's node in `ft_node_beat`, on others in `ft_node_speak`. The agent's thread, or one that
    makes a call for the agent, calls `arrives`, `has_place` and `close`.

    Args:
        connections: of this node, of which the shared one is used.
        look_s: the time between two looks for questions (seconds).

    Attributes:
        on_question: called by the thread that looks, with a topic and the number of the latest question about it. Must
            not block.
        on_waiting: called by the thread that looks when the others run without this node, which waits. Must not block.
    """

    def __init__(self, connections: Connections, look_s: float) -> None:
        self.look_s = look_s
        self.on_question: Callable[[Topic, int], None] = lambda topic, number: None
        self.on_waiting: Callable[[], None] = lambda: None
        self._connections = connections
        self._arrival: tuple[str, int] | None = None
        self._known: dict[Topic, int] = {}
        self._next_look = time.monotonic() + look_s
        self._one_at_a_time = threading.Lock()
        self._closed = False

    def is_due(self) -> bool:
        """Whether it is time to look for questions."""
        return time.monotonic() >= self._next_look

    def arrives(self, node: str, cycle: int) -> None:
        """Notes that this node has asked for a place, as `node`, after it left the cycle `cycle`.

        From now on each look reads, too, whether the coordinator lets this node wait while the others run.
        """
        self._arrival = node, cycle

    def has_place(self) -> None:
        """Notes that this node has its place, and waits no longer."""
        self._arrival = None

    def check(self) -> None:
        """Looks whether somebody has asked since the last look, and whether the others run without this node.

        Does neither while another thread uses the store: the thread that looks renews the lease, and must not wait.
        """
        self._next_look = time.monotonic() + self.look_s
        if self._one_at_a_time.locked():
            return
        self._look_for_wait()
        found = self._try(lambda store: store.counters([], COUNTERS)[1])
        if found is not None:
            self.note(found)
            self._next_look = time.monotonic() + self.look_s

    def note(self, counters: Sequence[bytes]) -> None:
        """Notes the values of `COUNTERS`; calls `on_question` for each topic that was asked about since the last call.

        Puts off the next look by two periods: where this is called more often, because the node reads beats, it makes
        no look of its own. A node that waits for a place still looks, whether the others run without it.
        """
        if self._arrival is None:
            self._next_look = time.monotonic() + 2 * self.look_s
        for topic, text in zip(Topic, counters, strict=True):
            number = whole_number(text or b"0", MAX_SENT) or 0
            if number > self._known.get(topic, 0):
                self._known[topic] = number
                self.on_question(topic, number)

    def _look_for_wait(self) -> None:
        """Calls `on_waiting`, once after each arrival, if the others run and this node has to wait."""
        arrival = self._arrival
        if arrival is None:
            return
        node, cycle = arrival
        text = self._try(lambda store: store.receive(waits_key(node), limit_s=0))
        waits_in = whole_number(text or b"", MAX_SENT)
        # What was written before its last place is of no account.
        if waits_in is not None and waits_in >= cycle and self._arrival is arrival:
            self._arrival = None
            self.on_waiting()

    def ask(self, topic: Topic) -> int | None:
        """Asks the other nodes. Returns the number of the question; None: the store does not answer. Blocks."""
        number = self._try(lambda store: store.count(counter_key(topic)))
        # This node need not be notified of its own question. If another node asked in between, it is notified of that.
        if number is not None and number == self._known.get(topic, 0) + 1:
            self._known[topic] = number
        return number

    def answer(self, topic: Topic, rank: int, text: str) -> None:
        """Writes the answer of this node, whose node rank is `rank`. Blocks; a lost answer is not sent again."""
        self._try(lambda store: store.publish({answer_key(topic, rank): text}))

    def answers(self, topic: Topic, ranks: Iterable[int]) -> Mapping[int, bytes]:
        """Returns node rank -> the last answer of that node; without the nodes that have not answered. Blocks.

        The answer may be to an earlier question: the text must contain the number.
        """
        wanted = list(ranks)
        found = self._try(lambda store: store.counters([], [answer_key(topic, rank) for rank in wanted])[1])
        return {rank: text for rank, text in zip(wanted, found or [b""] * len(wanted), strict=True) if text}

    def members(self) -> Members | None:
        """Returns the nodes of the last cycle; None: none has begun, or the store does not answer."""
        text = self._try(lambda store: store.receive(MEMBERS, limit_s=0))
        with contextlib.suppress(ProtocolError):
            return decode_as(Members, text or b"")
        return None

    def close(self) -> None:
        """Ends all use of the store: the last node that leaves removes what the job has written.

        Waits half a second at most for an operation that is under way.
        """
        is_free = self._one_at_a_time.acquire(timeout=_END_S)
        self._closed = True
        if is_free:
            self._one_at_a_time.release()

    def _try(self, work: Callable[[JobStore], _T]) -> _T | None:
        """Runs `work` on the shared connection, one at a time; returns None after `close` or if the store is lost."""
        with self._one_at_a_time:
            if self._closed:
                return None
            store: JobStore | None = None
            try:
                store = self._connections.shared.open()
                return work(store)
            except StoreLost:
                if store is not None:
                    self._connections.shared.drop(store)
                return None
