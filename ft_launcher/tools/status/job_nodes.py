"""Lets the nodes of a job ask each other about their ranks, so that one page or command shows the whole job.

`JobNodes` asks for this node, `NodeAnswers` answers for it. `composition.py` makes both where the rendezvous is ours.
Questions and answers go through the job's store (`job/link/questions.py`); what a node writes is in `node_record.py`.
Nothing that is decided of the training depends on any of this.

The store is slow and may stand still, so nothing here uses it in a thread that must not wait.

Threads:
- `ft_node_watch`: of `JobNodes`, while somebody wants to see all nodes; asks every 5 s and reads the answers.
- `ft_node_ask`: of `JobNodes`, one per request for stacks; lives until the answers are there or the deadline is over.
- `ft_node_answer`: of `NodeAnswers`, while there are questions to answer.
- The threads of the status servers call `JobNodes.seen`, `counts` and `ask_stacks`; the link's thread calls
  `NodeAnswers.on_question`. None of these calls blocks on the store.
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
"""How long a node waits for the stacks of its ranks (seconds). A stopped rank gives none."""
_READING_S = 0.3
"""How long a node waits for the readings of its monitors (seconds). Monitors answer at once."""
_EVERY_S, _READS = 5.0, 2
"""How often nodes are asked while somebody wants to see all of them (seconds), and how often answers are read then."""
_WANTED_S = 15.0
"""How long the other nodes go on reporting after the last request for their reports (seconds). The page asks every
second."""
_OLD = 2.0
"""A report is old after this many times the seconds between two questions, plus the time until a node looks for one.
Twice, since a busy host needs longer."""
_TRANSFER_S = 1.0
"""How long question and answer may take on their way through the store (seconds)."""
_LONGEST_LOOK_S = 20.0
"""Longest time that a node is given to look for a question (seconds). Where beats are longer, `/stacks` names nodes
silent that would have answered later."""
_POLL_S = 0.2
"""Seconds between two looks for answers. A look is one operation of the store for all nodes."""
_NOT_ASKED = "the other nodes cannot be asked"
_NOT_ANSWERED = "a question of another node cannot be answered"
_NOT_LINKED = "this node is not linked to the others: it has not joined them yet, or has left"
_NO_THREAD = "this launcher could not start a thread for it"
_NO_STORE = "the rendezvous' store does not answer, or no cycle has begun"


class JobNodes:
    """Asks the other nodes on behalf of this one: the `OtherNodes` of `asking.py`.

    Args:
        rendezvous: this node's.
        every_s: how often the other nodes are asked while somebody wants to see them (seconds).
    """

    def __init__(self, rendezvous: NodeRendezvous, every_s: float = _EVERY_S) -> None:
        self._rendezvous, self._every_s = rendezvous, every_s
        self.wanted_s = _WANTED_S
        """How long the other nodes go on reporting after the last call of `seen` (seconds)."""
        self._lock = threading.Lock()
        self._wanted_at = 0.0
        self._is_watching = False
        self._reports: dict[int, tuple[float, NodeRecord[Mapping[str, Any]]]] = {}
        """Node rank -> when the node's last report was read (monotonic seconds), and the report. Only reports that were
        made since `seen` has been in use."""

    def counts(self) -> Mapping[str, int]:
        """Returns how many nodes take part (`active`) and wait (`waiting`); empty where this node is not the
        coordinator."""
        members = self._rendezvous.members()
        if members is None:
            return {}
        return {"active": len(members.active) - len(members.gone), "waiting": len(members.waiting)}

    def seen(self) -> OthersSeen | None:
        """Returns the last reports of the other nodes; None where this node is not the coordinator. Does not block.

        The first call after a while starts the thread that asks; its result has no report yet.
        """
        questions, members = self._rendezvous.questions, self._rendezvous.members()
        if members is None:
            return None
        now = time.monotonic()
        with self._lock:
            self._wanted_at = now
            is_new, self._is_watching = not self._is_watching, True
            if is_new:  # a report from before would look like the last one of a node that was lost
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
        """The thread `ft_node_watch`: asks the other nodes every `every_s` seconds, until `seen` was not called for
        `wanted_s`."""
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
        """Returns whether `seen` was called lately."""
        with self._lock:
            return time.monotonic() < self._wanted_at + self.wanted_s

    def _read_ranks(self, questions: Questions, first: int) -> None:
        """Reads the answers to question `first` and to later ones. An older answer is left out, since its age is not
        known."""
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
        """Asks the other nodes where their ranks are. Does not block. The returned function blocks for their answers.

        The deadline is fixed here: the time until each node has looked for the question, plus the time of stacks and
        transfer.
        """
        questions = self._rendezvous.questions
        if questions is None:
            return lambda: OtherStacks(problem=_NOT_LINKED)
        deadline = time.monotonic() + min(questions.look_s, _LONGEST_LOOK_S) + _STACKS_S + _TRANSFER_S
        found: queue.SimpleQueue[OtherStacks] = queue.SimpleQueue()

        # In a thread, since an operation of a store whose host stands still ends only after a minute.
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
        """The thread `ft_node_ask`: asks, and returns the answers that are there at `deadline` (monotonic seconds)."""
        members = questions.members()
        number = questions.ask(Topic.STACKS)
        if members is None or number is None:
            return OtherStacks(problem=_NO_STORE)
        names = others_of(members, self._rendezvous.place)
        return _await_stacks(questions, names, number, members.cycle, deadline)


class NodeAnswers:
    """Answers the questions of other nodes about the ranks of this node.

    A node without a place in the cycle, or whose ranks do not run yet, answers nothing: answers lie at a key of the
    node rank, and the rank that it had last may be another node's by now.

    Args:
        status: the state of this node.
        asking: by which the monitors of this node are asked.
        times: the time ledger of this node.
        rendezvous: this node's.
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
        """Notes question `number` about `topic`, and starts a thread to answer it unless one runs. Does not block.

        Called by the link's thread, which also sends keep-alives and so must not wait. Of several questions about one
        topic the latest is answered. Questions about hangs are for `HangExchange` (`agent/hang_exchange.py`).
        """
        if topic is Topic.HANG:
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
        """The thread `ft_node_answer`: answers until no question is left, then ends."""
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
        """Answers one question, unless this node has no place in the cycle of its ranks, or loses it meanwhile."""
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
        """Returns the record of where the ranks are; an empty one where no rank runs, None where the agent does not
        answer."""
        match self._asking.ask(_STACKS_S, stacks=True):
            case True:
                return stacks_as_record(number, cycle, self._status.readings)
            case None:  # no rank runs
                return stacks_as_record(number, cycle, ())
        return None  # the agent's loop stands still: what was read last is old

    def _ranks(self, number: int, cycle: int) -> str:
        """Returns the record of the lines about the ranks. With readings of before, where the agent does not answer in
        time."""
        self._asking.ask(_READING_S)
        facts, readings = self._status.facts(), self._status.readings
        ranks = ranks_as_json(facts, readings, self._times.now(), time.monotonic())
        return ranks_as_record(number, cycle, ranks)


def _is_started(work: Callable[[], None], name: str, otherwise: str) -> bool:
    """Starts a daemon thread. Returns whether it could be started, and logs `otherwise` where not.

    On a host that can start no more threads the caller goes on without an answer. One caller is the link's thread,
    which must survive this.
    """
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        log_contained(otherwise, error)
        return False
    return True


def _await_stacks(questions: Questions, names: dict[int, str], number: int, cycle: int, deadline: float) -> OtherStacks:
    """Returns the stacks of other nodes that answer question `number` in `cycle`. Blocks until all have, or the
    deadline.

    Args:
        names: node rank -> name of the nodes to wait for.
        deadline: monotonic seconds.
    """
    silent, readings = dict(names), list[RankReading]()
    while silent:
        for rank, text in questions.answers(Topic.STACKS, silent).items():
            record = stacks_of_record(text, time.monotonic())
            # The answer to a later question will do as well.
            if record is not None and record.number >= number and record.cycle == cycle:
                del silent[rank]
                readings += record.ranks
        if time.monotonic() >= deadline:
            break
        if silent:
            time.sleep(_POLL_S)
    return OtherStacks(readings, [SilentNode(rank, name) for rank, name in silent.items()])
