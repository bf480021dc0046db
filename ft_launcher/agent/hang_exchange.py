"""Asks the other nodes where their ranks are while a rank of this node stands still, and answers their questions.

A node that asks increases a number in the job's store (`job/link/questions.py`), and looks for answers under the keys
of the other nodes. Each of them sees the new number, samples its ranks, and writes one answer, with the numbers of the
question and of the cycle: an answer to an earlier question is about ranks that may have gone on since.

A node that does not answer in time may be lost, or its agent stands still. `Others.is_complete` then says that ranks
are
missing: the rank that holds up the others may be one of these, so fewer findings are certain (`hang_clocks.py`).

Threads: `hang_watch.py` calls the public methods on the agent's thread, and none of them blocks. Each question and each
answer is an operation on the job's store. It runs in a thread `ft_hang_exchange`, which ends with the operation. The
link's thread calls `_on_question` when another node has asked. What arrives goes through an `EventQueue` to the agent's
thread. Decides nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ft_launcher.agent.in_process.store_threads import EventQueue
from ft_launcher.decide.attribution import hang_clocks
from ft_launcher.decide.attribution.hang_clocks import RankSample
from ft_launcher.job.link.questions import Questions, Topic, others_of
from ft_launcher.job.rendezvous.handler import NodeRendezvous
from ft_launcher.record.journal.contained import contained, log_contained
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.foreign import parse_object

_ANSWERS_S = 5.0
"""Seconds that nodes have to answer after they have seen a question, and that the answers have to arrive."""
_POLL_S = 0.2
"""Seconds between two look-ups of answers. Each is one operation of the store for all nodes."""
_MAX_BYTES = 1 << 20
"""Bytes of one answer at most, which has about 1 KB for each rank of a node. A longer one is not read."""
_NOT_ASKED = "whether ranks hang cannot be asked of the other nodes"


@dataclass(frozen=True)
class Others:
    """What the other nodes have answered.

    Attributes:
        ranks: a sample of each of their ranks.
        is_complete: whether these and the ranks of this node are all ranks of the job.
    """

    ranks: Sequence[RankSample]
    is_complete: bool


class HangExchange:
    """One node's end of the exchange.

    Args:
        rendezvous: of this node. This object receives its questions about hangs, and passes all others on to the
            previous receiver.
    """

    def __init__(self, rendezvous: NodeRendezvous) -> None:
        self._rendezvous = rendezvous
        self._pass_on, rendezvous.on_question = rendezvous.on_question, self._on_question
        self._news: EventQueue[int | Others] = EventQueue()
        self._asked: list[int] = []
        self._others: Others | None = None

    def begin(self) -> None:
        """Drops what was asked and answered in the last cycle."""
        self._news.drain()
        self._asked, self._others = [], None

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `questions` or `others` has something new."""
        return self._news.fileno()

    def questions(self) -> list[int]:
        """Returns the number of the last question that is not answered yet, in a list; empty: there is none.

        Of several questions the last will do: who asked earlier reads an answer with a higher number, too.
        """
        self._drain()
        asked, self._asked = self._asked[-1:], []
        return asked

    def others(self) -> Others | None:
        """Returns what the other nodes have answered to the last question; None: nothing since the last call."""
        self._drain()
        others, self._others = self._others, None
        return others

    def ask(self, cycle: int) -> None:
        """Asks the other nodes of a cycle. Does not block; `others` returns their answers later, in any case."""
        if not self._start(partial(self._ask, cycle)):
            self._news.put(Others((), False))

    def answer(self, number: int, cycle: int, ranks: Sequence[RankSample]) -> None:
        """Answers a question of another node. Does not block.

        Args:
            number: of the question.
            cycle: the present one.
            ranks: samples of this node's ranks.
        """
        records = [hang_clocks.to_record(rank) for rank in ranks]
        text = json.dumps({"number": number, "cycle": cycle, "ranks": records}, separators=(",", ":"))
        self._start(partial(self._answer, text, cycle))

    def _drain(self) -> None:
        """Sorts what has arrived into questions and answers. Does not block."""
        for item in self._news.drain():
            if isinstance(item, Others):
                self._others = item
            else:
                self._asked.append(item)

    def _start(self, work: partial[None]) -> bool:
        """Runs `work` in a thread; returns whether a thread could be started."""
        try:
            threading.Thread(target=work, name="ft_hang_exchange", daemon=True).start()
        except RuntimeError as error:  # no thread is left
            log_contained(_NOT_ASKED, error)
            return False
        return True

    # In threads.

    def _on_question(self, topic: Topic, number: int) -> None:
        """Receives a question of another node. Called by the link's thread; does not block."""
        if topic is Topic.HANG:
            self._news.put(number)
        else:
            self._pass_on(topic, number)

    def _answer(self, text: str, cycle: int) -> None:
        """Writes an answer to the job's store, unless this node has left the cycle meanwhile. Runs in a thread."""
        with contained("a question of another node cannot be answered"):
            questions, place = self._rendezvous.questions, self._rendezvous.current_place
            # Without a place in this cycle the key of the answer is another node's by now.
            if questions is not None and place is not None and place.cycle == cycle:
                questions.answer(Topic.HANG, place.rank, text)

    def _ask(self, cycle: int) -> None:
        """Asks, and puts the answers into the queue; after an error an empty result, since the checks wait for one.
        Runs in a thread."""
        found = Others((), False)
        with contained(_NOT_ASKED):
            questions = self._rendezvous.questions
            if questions is not None:
                found = self._answers(questions, cycle)
        self._news.put(found)

    def _answers(self, questions: Questions, cycle: int) -> Others:
        """Writes a question and collects the answers. Blocks until all nodes have answered, or time is up.

        Raises what a store raises.
        """
        members, number = questions.members(), questions.ask(Topic.HANG)
        if members is None or number is None or members.cycle != cycle:
            return Others((), False)
        silent = set(others_of(members, self._rendezvous.current_place))
        ranks: list[RankSample] = []
        deadline = time.monotonic() + questions.look_s + _ANSWERS_S
        while silent and time.monotonic() < deadline:
            for node_rank, text in questions.answers(Topic.HANG, silent).items():
                of_node = _ranks_in(text, number, cycle)
                if of_node is not None:
                    silent.discard(node_rank)
                    ranks += of_node
            if silent:
                time.sleep(_POLL_S)
        return Others(ranks, not silent)


def _ranks_in(text: bytes, number: int, cycle: int) -> list[RankSample] | None:
    """Returns the samples in an answer to question `number` or a later one; None: `text` is no such answer."""
    if len(text) > _MAX_BYTES:
        return None
    try:
        record = parse_object(text)
        if int(record.get("number", 0)) < number or record.get("cycle") != cycle:
            return None
        return [hang_clocks.of_record(rank) for rank in record["ranks"]]
    except (KeyError, ProtocolError, TypeError, ValueError):  # Any process at the store may have written the text.
        return None
