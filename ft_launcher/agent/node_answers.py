"""Answers what the nodes of a job ask about the ranks of this node.

Made by the node agent where the rendezvous is ours. A node that has no place, or whose ranks of it do not run yet,
answers nothing: the key of its last place is another node's by now.
"""

from __future__ import annotations

import threading
import time

from ft_launcher.agent.parts import NodeParts
from ft_launcher.nodes.questions import Topic
from ft_launcher.record.contained import contained, log_contained
from ft_launcher.rendezvous.handler import NodeRendezvous
from ft_launcher.status.node_record import ranks_as_record, stacks_as_record
from ft_launcher.status.summary import ranks_as_json

STACKS_S = 2.0
"""How long the stacks of this node are waited for (seconds): a rank that is stopped gives none."""
_READING_S = 0.3
"""How long monitors are waited for (seconds): they answer at once."""
_NOT_ANSWERED = "a question of another node cannot be answered"


class NodeAnswers:
    """Answers for one node.

    Args:
        parts: of this launcher.
        rendezvous: of this node.
    """

    def __init__(self, parts: NodeParts, rendezvous: NodeRendezvous) -> None:
        self._parts, self._rendezvous = parts, rendezvous
        self._lock = threading.Lock()
        self._asked: dict[Topic, int] = {}
        self._is_answering = False

    def heard(self, topic: Topic, number: int) -> None:
        """Notes a question; returns at once. A thread answers it, which lives no longer than that takes."""
        with self._lock:
            self._asked[topic] = number
            if self._is_answering:
                return
            self._is_answering = True
        try:
            threading.Thread(target=self._answer_all, name="ft_node_answer", daemon=True).start()
        except RuntimeError as error:  # the host has no more threads; the link's, which calls this, must not end
            with self._lock:
                self._is_answering = False
            log_contained(_NOT_ANSWERED, error)

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
        if questions is None or place is None or place.cycle != self._parts.status.facts().cycle:
            return
        if topic is Topic.STACKS:
            text = self._stacks(number, place.cycle)
        else:
            text = self._ranks(number, place.cycle)
        if text is not None and self._rendezvous.current_place is place:
            questions.answer(topic, place.rank, text)

    def _stacks(self, number: int, cycle: int) -> str | None:
        match self._parts.asking.ask(STACKS_S, stacks=True):
            case True:
                return stacks_as_record(number, cycle, self._parts.status.readings)
            case None:  # no rank runs
                return stacks_as_record(number, cycle, ())
        return None  # the agent's loop stands still: what was read last is old

    def _ranks(self, number: int, cycle: int) -> str:
        self._parts.asking.ask(_READING_S)
        facts, readings = self._parts.status.facts(), self._parts.status.readings
        return ranks_as_record(number, cycle, ranks_as_json(facts, readings, time.monotonic()))
