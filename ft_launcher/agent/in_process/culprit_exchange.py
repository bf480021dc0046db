"""Finds who held up the others before an in-process restart: has all nodes say where their ranks are.

A monitor suspects its rank shortly before a limit. At this moment `in_process.py` has all nodes asked for stacks. Later
would be too late: the interruption aborts the collectives of all ranks within milliseconds, and no stack then shows who
waited for whom.

1. The node of the suspected rank writes a question to the ranks' store (`ask`).
2. Each node sees it, and asks its monitors (`CulpritSearch.poll`). The answers go back to the store.
3. The node that hosts the store waits for the interruption, collects the answers, and decides (`_decide`).
4. The finding is written for the ranks, and put into `news` for the journal.

Everything happens in the store by which the ranks are interrupted. So the order of the store's operations tells before
from after, also where the clocks of nodes differ: an answer counts if the round was not interrupted when it was there.

    asked/N     a rank is about to be asked to restart: its call and round (`CulpritQuestion`). N counts in the cycle
    nodes/N     how many nodes have answered in time
    scenes/N    a line for each of these but the host: the node's name, and its ranks as in `all_nodes.to_record`

Threads: `CulpritSearch` runs on the agent's thread and never blocks. `CulpritExchange` has threads of
`store_threads.py`: `ft_culprit` answers all questions of the cycle; `ft_culpritN` asks question N and ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch.distributed import PrefixStore

from ft_launcher.agent.cycle.evidence import with_own_locks
from ft_launcher.agent.in_process.store_threads import EventQueue, Keys, StoreThreads
from ft_launcher.decide.attribution import RankEvidence, all_nodes, collective, rank_view
from ft_launcher.decide.attribution.all_nodes import NodeScene
from ft_launcher.decide.attribution.fault import HangFinding, HangKind
from ft_launcher.node.monitors.monitors import NodeMonitors
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.processes.making_store import making_store
from rank_monitor.contract.rounds.barrier import EVER, release, value_now
from rank_monitor.contract.rounds.round import Round
from rank_monitor.contract.wire.foreign import parse_json, parse_object
from rank_monitor.contract.wire.json_record import read_record, write_record
from rank_monitor.contract.wire.messages import RestartReport

logger = logging.getLogger(__name__)

_ASKED_FOR_S = 1.0
"""Seconds in which no further question is asked. All ranks exceed their limits within this time, or make progress after
all, so the first question is for all of them."""
_LONGEST_S = 0.75
"""Seconds from the question to the interruption at most. Monitors ask 0.3 s before the interruption; if none comes, the
rank has made progress after all."""
_OTHERS_S = 0.25
"""Seconds after the interruption in which answers arrive that other nodes wrote before it."""
_LOOKS_EVERY_S = 0.005
"""Seconds between two looks at the store. A restart takes 20 ms and more, and the function that is called again should
find the answer. Looks, since torch writes a warning to the console for each wait that ends by its limit."""
_SOFT_TIMEOUT = "SOFT_TIMEOUT"
"""The name of the `Interruption` because of which this is asked, as in the records that ranks write."""


@dataclass(frozen=True)
class CulpritQuestion:
    """The round that is about to be interrupted: the prefix of the keys of its call, and its number in it."""

    prefix: str
    number: int


@dataclass(frozen=True)
class Asked:
    """This node is to answer question `number`."""

    number: int


@dataclass(frozen=True)
class CulpritsFound:
    """Who held up the others in a round that was interrupted, also in words."""

    number: int
    finding: HangFinding
    text: str


class CulpritSearch:
    """Asks and answers for this node in one cycle, in the thread of the cycle loop.

    Args:
        monitors: of this node.
        exchange: with the other nodes.
        gather: returns the evidence of the ranks of this node.
    """

    def __init__(
        self,
        monitors: NodeMonitors,
        exchange: CulpritExchange,
        gather: Callable[[], Sequence[RankEvidence]],
    ) -> None:
        self._monitors, self._exchange, self._gather = monitors, exchange, gather
        self._round: CulpritQuestion | None = None
        """Where the wrapper of a rank is; None: no rank is in one, and nobody asks."""
        self._next_number = 0
        self._ask_again_at = 0.0
        self._open: tuple[int, int] | None = None
        """The number of the question that the monitors answer, and the token of their answers."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `poll` has something to do."""
        return self._exchange.news.fileno()

    def on_message(self, report: RestartReport) -> None:
        """Notes in which call, and in which round of it, the wrappers are. Listens to questions from the first report
        on."""
        if self._round is None:
            self._exchange.listen()
        self._round = CulpritQuestion(report.call_prefix, report.round)

    def suspected(self, now: float) -> None:
        """Asks all nodes, unless they were asked a moment ago. Called when a monitor suspects its rank."""
        if self._round is not None and now >= self._ask_again_at:
            self._ask_again_at = now + _ASKED_FOR_S
            self._exchange.ask(self._next_number, self._round)

    def poll(self, now: float) -> list[CulpritsFound]:
        """Passes questions to the monitors, and the monitors' answers to the exchange; returns new findings.

        Does not block. `now`: monotonic seconds.
        """
        found = []
        for news in self._exchange.news.drain():
            if isinstance(news, Asked):
                self._next_number, self._ask_again_at = news.number + 1, now + _ASKED_FOR_S
                self._open = news.number, self._monitors.ask_readings(stacks=True)
            else:
                found.append(news)
        if self._open is not None:
            self._answer(*self._open)
        return found

    def _answer(self, number: int, token: int) -> None:
        """Answers question `number` once all monitors have answered the request with this token."""
        readings = {rank: self._monitors.report(rank).reading for rank in self._monitors.local_ranks}
        tokens = {reading.token for reading in readings.values() if reading is not None}
        if any(later < token for later in tokens):  # somebody looks at the status, for which no stacks are asked for
            self._open = number, self._monitors.ask_readings(stacks=True)
        elif tokens == {token} and None not in readings.values():
            self._open = None
            ranks = [replace(rank, snapshot=readings[rank.local_rank]) for rank in self._gather()]
            self._exchange.answer(number, ranks)

    def close(self) -> None:
        """Closes the descriptors. To be called when the threads at the store have ended."""
        self._exchange.news.close()


class CulpritExchange:
    """Questions and answers of all nodes in one cycle, in threads at the ranks' store.

    Args:
        threads: at the cycle's store.
        nodes: that take part.
        started_at: when the ranks were started (monotonic seconds).
        is_host: this node hosts the store, and decides.

    Attributes:
        news: questions to this node, and on the host what was found.
    """

    def __init__(self, threads: StoreThreads, nodes: int, started_at: float, is_host: bool) -> None:
        self._threads, self._nodes, self._started_at, self._is_host = threads, nodes, started_at, is_host
        self.news: EventQueue[Asked | CulpritsFound] = EventQueue()
        self._answers: queue.SimpleQueue[tuple[int, Sequence[RankEvidence]]] = queue.SimpleQueue()

    def listen(self) -> None:
        """Starts the thread that answers the questions of this cycle."""
        self._threads.start("ft_culprit", prefix="ft_culprit", task=self._answer_all, end=self._end)

    def ask(self, number: int, question: CulpritQuestion) -> None:
        """Asks all nodes, this one too, unless another node has just asked under that number. Returns at once."""

        def ask(keys: Keys) -> None:
            release(keys, f"asked/{number}", write_record(question))

        self._threads.start(f"ft_culprit{number}", prefix="ft_culprit", task=ask, end=self._end)

    def answer(self, number: int, ranks: Sequence[RankEvidence]) -> None:
        """Passes on the answer of this node to question `number`: its ranks that take part, with their snapshots.

        Returns at once: the thread `ft_culprit` writes the answer.
        """
        self._answers.put((number, ranks))

    def _end(self, problem: str) -> None:
        """Logs the error with which a thread ended, unless the cycle is over."""
        if problem and not self._threads.is_over:
            logger.warning("who holds up the others before a restart in process cannot be found: %s", problem)

    def _answer_all(self, keys: Keys) -> None:
        """The function of the thread `ft_culprit`: waits for one question after the other until the cycle is over."""
        number = 0
        while True:
            keys.wait([f"asked/{number}"], EVER)
            try:
                question = read_record(CulpritQuestion, keys.get(f"asked/{number}"))
            except ProtocolError:  # Written by `StoreThreads.close` of another node: the cycle is over.
                return
            self.news.put(Asked(number))
            with making_store():
                keys_of_call = PrefixStore(question.prefix, keys.underlying_store)
            this_round = Round(keys_of_call, question.number)
            self._answer(keys, number, this_round, time.monotonic() + _LONGEST_S)
            number += 1

    def _answer(self, keys: Keys, number: int, this_round: Round, until: float) -> None:
        """Writes the answer of this node. If this node hosts the store, waits for the others' answers and decides."""
        ranks = self._answered(number, until)
        if this_round.is_over():
            ranks = None
        name = socket.gethostname()
        if ranks is not None:
            now = time.monotonic()
            ranks = with_own_locks(ranks, now, now - self._started_at)
            if not self._is_host:
                record = all_nodes.to_record(ranks, None, hung=True, nccl=None)
                keys.append(f"scenes/{number}", f"{json.dumps([name, record['ranks']])}\n")
            keys.add(f"nodes/{number}", 1)  # After the scene: a node that reads the count finds all scenes.
        if self._is_host:
            if self._made_no_progress(keys, number, this_round, until):
                own = NodeScene(name, rank_view.views(ranks or [], None), {})
                self._decide([own, *_of_others(keys, number)], _counted(keys, number) == self._nodes, this_round)
            for key in (f"scenes/{number}", f"nodes/{number}"):
                keys.delete_key(key)

    def _answered(self, number: int, until: float) -> Sequence[RankEvidence] | None:
        """Waits for the answer that the agent's thread passes on; None: it did not come in time."""
        while time.monotonic() < until and not self._threads.is_over:
            with contextlib.suppress(queue.Empty):
                of_number, ranks = self._answers.get(timeout=_LOOKS_EVERY_S)
                if of_number == number:
                    return ranks
        return None

    def _made_no_progress(self, keys: Keys, number: int, this_round: Round, until: float) -> bool:
        """Waits for the interruption, and then for the answers of the other nodes.

        Returns:
            Whether the ranks were interrupted because a rank made no progress. For other interruptions no
            culprit is named.
        """
        while not this_round.is_over():
            if time.monotonic() >= until or self._threads.is_over:
                return False
            time.sleep(_LOOKS_EVERY_S)
        until = time.monotonic() + _OTHERS_S
        while _counted(keys, number) < self._nodes and time.monotonic() < until and not self._threads.is_over:
            time.sleep(_LOOKS_EVERY_S)
        first = parse_object(next(iter(this_round.records()), ""))
        return first.get("interruption") == _SOFT_TIMEOUT

    def _decide(self, nodes: Sequence[NodeScene], all_ranks: bool, this_round: Round) -> None:
        """Writes who held up the others, for the ranks and as news; nothing if nobody waited for anybody."""
        views = {view.rank: (view, node.name) for node in nodes for view in node.views}
        finding = all_nodes.find_culprits(nodes, all_ranks)
        if not finding.waiting and not finding.culprits:
            return
        text = finding.text
        if finding.culprits:
            first, name = views[finding.culprits[0]]
            text = f"rank {first.rank}"
            if self._nodes > 1:
                text += f" on {name}"
            text += f" {collective.sentence(finding, first.scene)}"
            if finding.kind is not HangKind.GONE and first.scene.own_frame:
                text += f"; it is at {first.scene.own_frame}"
            record = {"finding": finding.kind.value, "ranks": list(finding.culprits), "text": text}
            this_round.set_culprit(json.dumps(record))
        self.news.put(CulpritsFound(this_round.number, finding, text))


def _counted(keys: Keys, number: int) -> int:
    """Returns how many nodes have answered question `number`."""
    return int(keys.add(f"nodes/{number}", 0))


def _of_others(keys: Keys, number: int) -> list[NodeScene]:
    """Returns what the other nodes have written about question `number`."""
    found = []
    for line in (value_now(keys, f"scenes/{number}") or b"").splitlines():
        # Any rank may write to this store. A line that does not fit is left out.
        with contextlib.suppress(ProtocolError, ValueError, TypeError):
            name, records = parse_json(line)
            found.append(all_nodes.of_records(str(name), records, None))
    return found
