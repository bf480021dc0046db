"""Who held up the others before a restart in process: only by answers that were there before it, on a real store."""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from ft_launcher.agent.in_process.culprit_exchange import Asked, CulpritExchange, CulpritQuestion, CulpritsFound
from ft_launcher.agent.in_process.store_threads import StoreThreads, connect
from ft_launcher.decide.attribution import RankEvidence
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.rounds.round import Round
from rank_monitor.contract.wire.launcher_messages import Snapshot
from tests.patience import patient, until

pytestmark = pytest.mark.every_torch  # the store of older ones has another server

HOST = "127.0.0.1"
LIMIT_S = 20.0
CALL, NUMBER = "in_process/call", 2
NO_PROGRESS, RAISED, AFTERWARDS = (
    json.dumps({"rank": 0, "interruption": "SOFT_TIMEOUT"}),
    json.dumps({"rank": 3, "interruption": "EXCEPTION", "error": "ValueError at train.py:7"}),
    json.dumps({"rank": 1, "interruption": "EXCEPTION", "is_collateral": True}),
)
WAITS = ["torch/distributed/distributed_c10d.py:3252 in all_reduce", "train.py:20 in step"]
LOADS = ["train.py:9 in load"]


def rank(number: int, loads: bool = False) -> RankEvidence:
    """One of four ranks in the fourth collective, or on its way to it."""
    state: dict[str, Any] = {"entered": 4 - loads, "finished": 3, "operation": "all_reduce"}
    snapshot = Snapshot(-1, True, True, 7, {}, 0.1, frames=LOADS if loads else WAITS, groups={"0": state})
    return RankEvidence(number, number % 2, 100 + number, snapshot=snapshot)


@dataclass
class Nodes:
    """A job's node that hosts the store, and `guest`, the other."""

    store: TCPStore
    host: CulpritExchange
    guest: CulpritExchange
    ends: list[StoreThreads]

    @property
    def round(self) -> Round:
        return Round(PrefixStore(CALL, self.store), NUMBER)

    def ask(self, number: int = 0) -> None:
        """A rank of the other node is about to be asked to restart."""
        self.guest.ask(number, CulpritQuestion(CALL, NUMBER))
        assert news(self.guest) == news(self.host) == Asked(number)


def news(exchange: CulpritExchange) -> Asked | CulpritsFound:
    assert readable([exchange.news.fileno()], patient(LIMIT_S))
    (found,) = exchange.news.drain()
    return found


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    limit = datetime.timedelta(seconds=patient(LIMIT_S))
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=limit)
    threads = [StoreThreads(partial(connect, HOST, store.port)) for _ in range(2)]
    host, guest = (CulpritExchange(of_node, 2, time.monotonic(), of_node is threads[0]) for of_node in threads)
    made = Nodes(store, host, guest, threads)
    for exchange in (made.host, made.guest):
        exchange.listen()
    yield made
    for of_node in threads:
        of_node.close()


@pytest.mark.parametrize("guilty", [1, 2])
def test_all_nodes_answered_before_it(nodes: Nodes, guilty: int) -> None:
    nodes.ask()
    nodes.host.answer(0, [rank(0), rank(1, guilty == 1)])
    nodes.guest.answer(0, [rank(2, guilty == 2), rank(3)])
    until_answered(nodes, 2)
    nodes.round.interrupt(NO_PROGRESS)
    nodes.round.interrupt(AFTERWARDS)
    found = news(nodes.host)
    assert isinstance(found, CulpritsFound)
    assert (found.number, found.finding.culprits, len(found.finding.waiting)) == (NUMBER, (guilty,), 3)
    assert found.text.startswith(f"rank {guilty} on ")
    assert found.text.endswith(
        " never entered all_reduce 4 of group 0, and 3 ranks wait for it; it is at train.py:9 in load"
    )
    # Written by another connection just before the news: torch's store does not acknowledge a `set`.
    told = json.loads(until(nodes.round.culprit))
    assert told == {"finding": "behind", "ranks": [guilty], "text": found.text}


@pytest.mark.parametrize("guilty", [1, 2])
def test_a_node_that_answers_too_late_says_nothing(nodes: Nodes, guilty: int) -> None:
    """Its ranks may have been interrupted already. By the recorder of the others one of them may still be known."""
    nodes.ask()
    nodes.host.answer(0, [rank(0), rank(1, guilty == 1)])
    until_answered(nodes, 1)
    nodes.round.interrupt(NO_PROGRESS)
    nodes.guest.answer(0, [replace(rank(2), snapshot=None), replace(rank(3), snapshot=None)])
    found = news(nodes.host)
    assert isinstance(found, CulpritsFound)
    assert found.finding.culprits == ((1,) if guilty == 1 else ())


def test_another_reason_says_itself_who_is_to_blame(nodes: Nodes) -> None:
    nodes.ask()
    nodes.host.answer(0, [rank(0), rank(1, True)])
    nodes.guest.answer(0, [rank(2), rank(3)])
    until_answered(nodes, 2)
    nodes.round.interrupt(RAISED)
    nodes.round.interrupt(NO_PROGRESS)
    nodes.ask(1)  # it is taken once the first is done with
    assert not nodes.round.culprit()
    assert not nodes.host.news.drain()


def test_progress_after_all(nodes: Nodes) -> None:
    """The answers to the first question say nothing about the second."""
    nodes.guest.ask(0, CulpritQuestion(CALL, NUMBER))
    for number, guilty in enumerate((1, 3)):
        if number:
            nodes.guest.ask(number, CulpritQuestion(CALL, NUMBER))
        # The host comes to the second question when it has given up the first.
        for exchange, ranks in ((nodes.guest, (2, 3)), (nodes.host, (0, 1))):
            assert news(exchange) == Asked(number)
            exchange.answer(0, [rank(one, one == 1) for one in ranks])
            exchange.answer(number, [rank(one, one == guilty) for one in ranks])
        until_answered(nodes, 2, number)
    nodes.round.interrupt(NO_PROGRESS)
    found = news(nodes.host)
    assert isinstance(found, CulpritsFound)
    assert found.finding.culprits == (3,)


def test_nobody_waits(nodes: Nodes) -> None:
    nodes.ask()
    for exchange, ranks in ((nodes.host, (0, 1)), (nodes.guest, (2, 3))):
        exchange.answer(0, [rank(number, True) for number in ranks])
    until_answered(nodes, 2)
    nodes.round.interrupt(NO_PROGRESS)
    nodes.ask(1)
    assert not nodes.round.culprit()


def test_a_node_that_leaves_ends_it(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    nodes.ends[0].close()
    nodes.ends[1].close()

    def have_ended() -> bool:
        return not any(thread.name.startswith("ft_culprit") for thread in threading.enumerate())

    # Half a second, in which `close` waits for each at most, is little on a busy machine.
    until(have_ended, "the end of all threads", LIMIT_S)
    assert not caplog.records


def until_answered(nodes: Nodes, answered: int, number: int = 0) -> None:
    """Waits until so many nodes have answered."""
    until(lambda: nodes.store.add(f"ft_culprit/nodes/{number}", 0) >= answered, f"{answered} answers", LIMIT_S)
