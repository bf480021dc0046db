"""Answers what other nodes ask about the ranks of this node, and asks them, for those who want to see the whole job.

Made by the node agent where the rendezvous is ours. Nothing is written or read while nobody asks; what is decided of
the training does not depend on it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ft_launcher.agent.parts import NodeParts
from ft_launcher.nodes.messages import NO_CYCLE, Members, RankAssigned
from ft_launcher.nodes.questions import Questions, Topic
from ft_launcher.record.contained import contained
from ft_launcher.rendezvous.handler import NodeRendezvous
from ft_launcher.status.node_record import (
    RanksRecord,
    ranks_as_record,
    ranks_of_record,
    stacks_as_record,
    stacks_of_record,
)
from ft_launcher.status.node_status import RankReading
from ft_launcher.status.other_nodes import NodeSeen, OthersSeen, OtherStacks, SilentNode
from ft_launcher.status.summary import ranks_as_json

_STACKS_S = 2.0
"""How long the stacks of this node are waited for (seconds): a rank that is stopped gives none."""
_READING_S = 0.3
"""How long monitors are waited for (seconds): they answer at once."""
_EVERY_S, _READS = 5.0, 2
"""How often nodes are asked while somebody wants to see all of them (seconds), and how often answers are read then."""
_WANTED_S = 15.0
"""So long after the last one who wanted to know (seconds): the page asks every second."""
_TRANSFER_S = 1.0
"""What question and answer may take on their way, after a node has looked (seconds)."""
_LONGEST_LOOK_S = 20.0
"""With beats that are longer than that, nodes are named silent which would have answered (seconds)."""
_POLL_S = 0.2
"""Between two looks for answers, of which there are many: each is one operation of the store for all nodes."""
_NOT_LINKED = "this node is not linked to the others: it has not joined them yet, or has left"
_NO_STORE = "the rendezvous' store does not answer, or no cycle has begun"


class JobNodes:
    """This node among those that ask each other.

    Args:
        parts: of this launcher.
        rendezvous: of this node.
    """

    def __init__(self, parts: NodeParts, rendezvous: NodeRendezvous) -> None:
        self._parts, self._rendezvous = parts, rendezvous
        self._lock = threading.Lock()
        self._asked: dict[Topic, int] = {}
        self._is_answering = False
        self._wanted_at = 0.0
        self._is_watching = False
        self._said: dict[int, tuple[float, RanksRecord]] = {}
        """What the node of a node rank has said last, and when that was read (monotonic seconds)."""
        rendezvous.heard = self._heard

    # Answers.

    def _heard(self, topic: Topic, number: int) -> None:
        """Notes a question. A thread answers it, which lives no longer than that takes."""
        with self._lock:
            self._asked[topic] = number
            if self._is_answering:
                return
            self._is_answering = True
        threading.Thread(target=self._answer_all, name="ft_node_answer", daemon=True).start()

    def _answer_all(self) -> None:
        while True:
            with self._lock:
                asked, self._asked = self._asked, {}
                if not asked:
                    self._is_answering = False
                    return
            for topic, number in asked.items():
                with contained("a question of another node cannot be answered"):
                    self._answer(topic, number)

    def _answer(self, topic: Topic, number: int) -> None:
        if topic is Topic.STACKS:
            text = self._stacks_here(number)
        else:
            text = self._ranks_here(number)
        questions, place = self._rendezvous.questions, self._rendezvous.place
        if questions is not None and place is not None:
            questions.answer(topic, place.rank, text)

    def _stacks_here(self, number: int) -> str:
        readings: Sequence[RankReading] = ()
        if self._parts.asking.ask(_STACKS_S, stacks=True) is not None:
            readings = self._parts.status.readings
        return stacks_as_record(number, readings)

    def _ranks_here(self, number: int) -> str:
        self._parts.asking.ask(_READING_S)
        facts, readings = self._parts.status.facts(), self._parts.status.readings
        cycle = NO_CYCLE
        if facts.cycle is not None:
            cycle = facts.cycle
        return ranks_as_record(number, cycle, ranks_as_json(facts, readings, time.monotonic()))

    # Questions.

    def counts(self) -> Mapping[str, int]:
        """Returns how many nodes take part and wait, where this node is the coordinator."""
        members = self._rendezvous.members()
        if members is None:
            return {}
        return {"active": len(members.active), "waiting": len(members.waiting)}

    def seen(self) -> OthersSeen | None:
        """Returns what the other nodes have said last, where this node is the coordinator."""
        members = self._rendezvous.members()
        if members is None:
            return None
        now = time.monotonic()
        with self._lock:
            self._wanted_at = now
            is_new, self._is_watching = not self._is_watching, True
            said = dict(self._said)
        if is_new:
            threading.Thread(target=self._watch, name="ft_node_watch", daemon=True).start()
        nodes = []
        for rank, name in _others(members, self._rendezvous.place).items():
            heard = said.get(rank)
            if heard is None or heard[1].cycle != members.cycle:
                nodes.append(NodeSeen(rank, name))
            else:
                nodes.append(NodeSeen(rank, name, now - heard[0], heard[1].ranks))
        return OthersSeen(nodes, members.waiting)

    def _watch(self) -> None:
        """Asks the other nodes again and again, until nobody has wanted to know for a while."""
        with contained("the other nodes cannot be asked"):
            while self._ask_ranks():
                for _ in range(_READS):
                    time.sleep(_EVERY_S / _READS)
                    self._read_ranks()
        with self._lock:
            self._is_watching = False

    def _ask_ranks(self) -> bool:
        questions = self._rendezvous.questions
        with self._lock:
            is_wanted = time.monotonic() < self._wanted_at + _WANTED_S
        if not is_wanted or questions is None:
            return False
        questions.ask(Topic.RANKS)
        return True

    def _read_ranks(self) -> None:
        questions, members = self._rendezvous.questions, self._rendezvous.members()
        if questions is None or members is None:
            return
        for rank, text in questions.answers(Topic.RANKS, _others(members, self._rendezvous.place)).items():
            record = ranks_of_record(text)
            with self._lock:
                known = self._said.get(rank)
                if record is not None and (known is None or known[1] != record):
                    self._said[rank] = (time.monotonic(), record)

    def ask_stacks(self) -> Callable[[], OtherStacks]:
        """Asks all nodes where their ranks are. The function that it returns waits for the answers of the others."""
        questions = self._rendezvous.questions
        if questions is None:
            return lambda: OtherStacks(problem=_NOT_LINKED)
        deadline = time.monotonic() + min(questions.look_s, _LONGEST_LOOK_S) + _STACKS_S + _TRANSFER_S
        found: queue.SimpleQueue[OtherStacks] = queue.SimpleQueue()

        # In a thread: an operation of a store whose host stands still ends after a minute.
        def ask() -> None:
            with contained("the other nodes cannot be asked"):
                found.put(self._ask_stacks(questions, deadline))

        def wait() -> OtherStacks:
            with contextlib.suppress(queue.Empty):
                return found.get(timeout=max(0.0, deadline + _TRANSFER_S - time.monotonic()))
            return OtherStacks(problem=_NO_STORE)

        threading.Thread(target=ask, name="ft_node_ask", daemon=True).start()
        return wait

    def _ask_stacks(self, questions: Questions, deadline: float) -> OtherStacks:
        members = questions.members()
        number = questions.ask(Topic.STACKS)
        if members is None or number is None:
            return OtherStacks(problem=_NO_STORE)
        return _await_stacks(questions, _others(members, self._rendezvous.place), number, deadline)


def _others(members: Members, place: RankAssigned | None) -> dict[int, str]:
    """Returns the names of the other nodes of a cycle by node rank; `place` is that of this node, if it has one."""
    names = dict(enumerate(members.active))
    if place is not None and place.cycle == members.cycle:
        names.pop(place.rank, None)
    return names


def _await_stacks(questions: Questions, names: dict[int, str], number: int, deadline: float) -> OtherStacks:
    """Waits until the nodes `names`, by node rank, have answered a question, or until the deadline."""
    silent, readings = dict(names), list[RankReading]()
    while silent:
        for rank, text in questions.answers(Topic.STACKS, silent).items():
            record = stacks_of_record(text, time.monotonic())
            # That of a later question will do as well.
            if record is not None and record.number >= number:
                del silent[rank]
                readings += record.readings
        if time.monotonic() >= deadline:
            break
        if silent:
            time.sleep(_POLL_S)
    return OtherStacks(readings, [SilentNode(rank, name) for rank, name in silent.items()])
