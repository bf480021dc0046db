"""Answers what other nodes ask about the ranks of this node, and asks them, for those who want to see the whole job.

Made by the node agent where the rendezvous is ours. Nothing is written or read while nobody asks; what is decided of
the training does not depend on it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence

from ft_launcher.agent.parts import NodeParts
from ft_launcher.nodes.questions import Questions, Topic
from ft_launcher.record.contained import contained
from ft_launcher.rendezvous.handler import NodeRendezvous
from ft_launcher.status.node_record import stacks_as_record, stacks_of_record
from ft_launcher.status.node_status import RankReading
from ft_launcher.status.other_nodes import OtherStacks, SilentNode

_STACKS_S = 2.0
"""How long the stacks of this node are waited for (seconds): a rank that is stopped gives none."""
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
        readings = self._stacks_here()
        questions, place = self._rendezvous.questions, self._rendezvous.place
        if questions is not None and place is not None:
            questions.answer(topic, place.rank, stacks_as_record(number, readings))

    def _stacks_here(self) -> Sequence[RankReading]:
        if self._parts.asking.ask(_STACKS_S, stacks=True) is None:
            return ()
        return self._parts.status.readings

    # Questions.

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
        names = dict(enumerate(members.active))
        place = self._rendezvous.place
        if place is not None and place.cycle == members.cycle:
            names.pop(place.rank, None)
        return _await_stacks(questions, names, number, deadline)


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
