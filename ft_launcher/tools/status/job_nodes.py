"""What the nodes of a job ask each other about their ranks, for those who want to see the whole job: asks and answers.

Made by `composition.py` where the rendezvous is ours. What is decided of the training does not depend on it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ft_launcher.agent.times import NodeTimes
from ft_launcher.job.link.questions import Questions, Topic, others_of
from ft_launcher.job.rendezvous.handler import NodeRendezvous
from ft_launcher.record.journal.contained import contained, log_contained
from ft_launcher.tools.status.asking import Asking, NodeSeen, OthersSeen, OtherStacks, SilentNode
from ft_launcher.tools.status.node_record import (
    NodeRecord,
    ranks_as_record,
    ranks_of_record,
    stacks_as_record,
    stacks_of_record,
)
from ft_launcher.tools.status.node_status import NodeStatus, RankReading
from ft_launcher.tools.status.summary import ranks_as_json

_STACKS_S = 2.0
"""How long a node waits for the stacks of its ranks (seconds): a rank that is stopped gives none."""
_READING_S = 0.3
"""How long a node waits for its monitors (seconds): they answer at once."""
_EVERY_S, _READS = 5.0, 2
"""How often nodes are asked while somebody wants to see all of them (seconds), and how often answers are read then."""
_WANTED_S = 15.0
"""So long after the last one who wanted to know (seconds): the page asks every second."""
_OLD = 2.0
"""What nodes have said is as old as the time between questions and that until they look; and twice, on a busy host."""
_TRANSFER_S = 1.0
"""What question and answer may take on their way, after a node has looked (seconds)."""
_LONGEST_LOOK_S = 20.0
"""With beats that are longer than that, nodes are named silent which would have answered (seconds)."""
_POLL_S = 0.2
"""Between two looks for answers, of which there are many: each is one operation of the store for all nodes."""
_NOT_ASKED = "the other nodes cannot be asked"
_NOT_ANSWERED = "a question of another node cannot be answered"
_NOT_LINKED = "this node is not linked to the others: it has not joined them yet, or has left"
_NO_THREAD = "this launcher could not start a thread for it"
_NO_STORE = "the rendezvous' store does not answer, or no cycle has begun"


class JobNodes:
    """Asks for one node.

    Args:
        rendezvous: of this node.
        every_s: how often the other nodes are asked while somebody wants to see them (seconds).
    """

    def __init__(self, rendezvous: NodeRendezvous, every_s: float = _EVERY_S) -> None:
        self._rendezvous, self._every_s = rendezvous, every_s
        self._lock = threading.Lock()
        self._wanted_at = 0.0
        self._is_watching = False
        self._reports: dict[int, tuple[float, NodeRecord[Mapping[str, Any]]]] = {}
        """By node rank: what a node has said last since this is wanted, and when that was read (monotonic seconds)."""

    def counts(self) -> Mapping[str, int]:
        """Returns how many nodes take part and wait, where this node is the coordinator."""
        members = self._rendezvous.members()
        if members is None:
            return {}
        return {"active": len(members.active) - len(members.gone), "waiting": len(members.waiting)}

    def seen(self) -> OthersSeen | None:
        """Returns what the other nodes have said last, where this node is the coordinator."""
        questions, members = self._rendezvous.questions, self._rendezvous.members()
        if members is None:
            return None
        now = time.monotonic()
        with self._lock:
            self._wanted_at = now
            is_new, self._is_watching = not self._is_watching, True
            if is_new:  # what was said long ago would look like the last words of nodes that are lost
                self._reports = {}
            said = dict(self._reports)
        if is_new and not _is_started(self._watch, "ft_node_watch", _NOT_ASKED):
            with self._lock:
                self._is_watching = False
        nodes = []
        for rank, name in others_of(members, self._rendezvous.place).items():
            heard = said.get(rank)
            if heard is None or heard[1].cycle != members.cycle:
                nodes.append(NodeSeen(rank, name))
            else:
                nodes.append(NodeSeen(rank, name, now - heard[0], heard[1].ranks))
        look_s = 0.0
        if questions is not None:
            look_s = questions.look_s
        return OthersSeen(nodes, members.waiting, _OLD * (self._every_s + look_s))

    def _watch(self) -> None:
        """Asks the other nodes again and again, until nobody has wanted to know for a while."""
        with contained(_NOT_ASKED):
            first: int | None = None
            while self._is_wanted():
                questions = self._rendezvous.questions
                if questions is None:
                    break
                number = questions.ask(Topic.RANKS)
                if first is None:
                    first = number
                for _ in range(_READS):
                    time.sleep(self._every_s / _READS)
                    if first is not None:
                        self._read_ranks(questions, first)
        with self._lock:
            self._is_watching = False

    def _is_wanted(self) -> bool:
        with self._lock:
            return time.monotonic() < self._wanted_at + _WANTED_S

    def _read_ranks(self, questions: Questions, first: int) -> None:
        """Reads what has been answered to question `first` and later ones: what is older has no age that is known."""
        members = self._rendezvous.members()
        if members is None:
            return
        for rank, text in questions.answers(Topic.RANKS, others_of(members, self._rendezvous.place)).items():
            record = ranks_of_record(text)
            if record is None or record.number < first:
                continue
            with self._lock:
                known = self._reports.get(rank)
                if known is None or known[1] != record:
                    self._reports[rank] = (time.monotonic(), record)

    def ask_stacks(self) -> Callable[[], OtherStacks]:
        """Asks all nodes where their ranks are. The function that it returns waits for the answers of the others."""
        questions = self._rendezvous.questions
        if questions is None:
            return lambda: OtherStacks(problem=_NOT_LINKED)
        deadline = time.monotonic() + min(questions.look_s, _LONGEST_LOOK_S) + _STACKS_S + _TRANSFER_S
        found: queue.SimpleQueue[OtherStacks] = queue.SimpleQueue()

        # In a thread: an operation of a store whose host stands still ends after a minute.
        def ask() -> None:
            with contained(_NOT_ASKED):
                found.put(self._ask_stacks(questions, deadline))

        def wait() -> OtherStacks:
            with contextlib.suppress(queue.Empty):
                return found.get(timeout=max(0.0, deadline + _TRANSFER_S - time.monotonic()))
            return OtherStacks(problem=_NO_STORE)

        if not _is_started(ask, "ft_node_ask", _NOT_ASKED):
            return lambda: OtherStacks(problem=_NO_THREAD)
        return wait

    def _ask_stacks(self, questions: Questions, deadline: float) -> OtherStacks:
        members = questions.members()
        number = questions.ask(Topic.STACKS)
        if members is None or number is None:
            return OtherStacks(problem=_NO_STORE)
        names = others_of(members, self._rendezvous.place)
        return _await_stacks(questions, names, number, members.cycle, deadline)


class NodeAnswers:
    """Answers for one node.

    A node that has no place, or whose ranks of it do not run yet, answers nothing: the key of its last place is another
    node's by now.

    Args:
        status: of this node.
        asking: by which its monitors are asked.
        times: of this node.
        rendezvous: of this node.
    """

    def __init__(self, status: NodeStatus, asking: Asking, times: NodeTimes, rendezvous: NodeRendezvous) -> None:
        self._status = status
        self._asking = asking
        self._times = times
        self._rendezvous = rendezvous
        self._lock = threading.Lock()
        self._asked: dict[Topic, int] = {}
        self._is_answering = False

    def on_question(self, topic: Topic, number: int) -> None:
        """Notes a question; returns at once. A thread answers it, which lives no longer than that takes."""
        if topic is Topic.HANG:  # `HangExchange` answers
            return
        with self._lock:
            self._asked[topic] = number
            if self._is_answering:
                return
            self._is_answering = True
        if not _is_started(self._answer_all, "ft_node_answer", _NOT_ANSWERED):
            with self._lock:
                self._is_answering = False

    def _answer_all(self) -> None:
        while True:
            with self._lock:
                asked, self._asked = self._asked, {}
                if not asked:
                    self._is_answering = False
                    return
            for topic, number in asked.items():
                with contained(_NOT_ANSWERED):
                    self._answer(topic, number)

    def _answer(self, topic: Topic, number: int) -> None:
        questions, place = self._rendezvous.questions, self._rendezvous.current_place
        if questions is None or place is None or place.cycle != self._status.facts().cycle:
            return
        if topic is Topic.STACKS:
            text = self._stacks(number, place.cycle)
        else:
            text = self._ranks(number, place.cycle)
        if text is not None and self._rendezvous.current_place is place:
            questions.answer(topic, place.rank, text)

    def _stacks(self, number: int, cycle: int) -> str | None:
        match self._asking.ask(_STACKS_S, stacks=True):
            case True:
                return stacks_as_record(number, cycle, self._status.readings)
            case None:  # no rank runs
                return stacks_as_record(number, cycle, ())
        return None  # the agent's loop stands still: what was read last is old

    def _ranks(self, number: int, cycle: int) -> str:
        self._asking.ask(_READING_S)
        facts, readings = self._status.facts(), self._status.readings
        ranks = ranks_as_json(facts, readings, self._times.now(), time.monotonic())
        return ranks_as_record(number, cycle, ranks)


def _is_started(work: Callable[[], None], name: str, otherwise: str) -> bool:
    """Starts a thread; returns whether it could, and logs `otherwise` if not.

    On a host that has no more threads, those who ask go on without, as does the link's thread that hears questions.
    """
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        log_contained(otherwise, error)
        return False
    return True


def _await_stacks(questions: Questions, names: dict[int, str], number: int, cycle: int, deadline: float) -> OtherStacks:
    """Waits until the nodes `names`, by node rank, have answered a question in a cycle, or until the deadline."""
    silent, readings = dict(names), list[RankReading]()
    while silent:
        for rank, text in questions.answers(Topic.STACKS, silent).items():
            record = stacks_of_record(text, time.monotonic())
            # That of a later question will do as well.
            if record is not None and record.number >= number and record.cycle == cycle:
                del silent[rank]
                readings += record.ranks
        if time.monotonic() >= deadline:
            break
        if silent:
            time.sleep(_POLL_S)
    return OtherStacks(readings, [SilentNode(rank, name) for rank, name in silent.items()])
