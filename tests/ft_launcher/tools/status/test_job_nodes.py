"""What nodes show of each other: answers to questions of this watch and this cycle, and nothing old; and what a node
answers about its ranks: only while it has a place of the cycle that they run in."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from ft_launcher.job.coordinator.node_messages import Members
from ft_launcher.job.link.questions import Topic
from ft_launcher.record import events
from ft_launcher.tools.status.asking import Asking, NodeSeen, SilentNode
from ft_launcher.tools.status.job_nodes import JobNodes, NodeAnswers
from ft_launcher.tools.status.node_record import ranks_as_record, ranks_of_record, stacks_as_record, stacks_of_record
from ft_launcher.tools.status.node_status import NodeStatus, RankReading
from tests.ft_launcher.job.nodes_of_a_test import place
from tests.patience import until

SOON_S = 0.02
"""How often nodes are asked here (seconds)."""
BEGUN = events.CycleStartEvent(0, 1, 2, "host:1", [])


class AskedNodes:
    """Stands for the store, which is a dictionary, and for `Questions` of every node."""

    look_s = 0.01

    def __init__(self, members: Members) -> None:
        self.current = members
        self.asked = dict.fromkeys(Topic, 0)
        self.written: dict[tuple[Topic, int], bytes] = {}

    def ask(self, topic: Topic) -> int:
        self.asked[topic] += 1
        return self.asked[topic]

    def answer(self, topic: Topic, rank: int, text: str) -> None:
        self.written[topic, rank] = text.encode()

    def answers(self, topic: Topic, ranks: Iterable[int]) -> dict[int, bytes]:
        return {rank: self.written[topic, rank] for rank in ranks if (topic, rank) in self.written}

    def members(self) -> Members:
        return self.current

    def rendezvous(self, rank: int | None, cycle: int = 0) -> Any:
        """That of the node with this node rank; None: it waits for a place."""
        entered = None
        if rank is not None:
            entered = place(cycle, rank, 2)
        return SimpleNamespace(questions=self, place=entered, current_place=entered, members=self.members)


def seen(asks: JobNodes) -> NodeSeen:
    found = asks.seen()
    assert found is not None
    (node,) = found.nodes
    return node


def test_only_answers_to_questions_of_this_watch_are_shown() -> None:
    of_others = threads_named("ft_node_watch")
    nodes = AskedNodes(Members(0, ["a", "b"]))
    nodes.asked[Topic.RANKS] = 7
    nodes.answer(Topic.RANKS, 1, ranks_as_record(7, 0, []))
    asks = JobNodes(nodes.rendezvous(0), SOON_S)
    assert seen(asks).age_s is None
    until(lambda: seen(asks) and nodes.asked[Topic.RANKS] >= 10)
    assert seen(asks).age_s is None, "who knows how old that is"
    nodes.answer(Topic.RANKS, 1, ranks_as_record(8, 0, []))
    until(lambda: seen(asks).age_s is not None)
    asks.wanted_s = 0.0
    until(lambda: threads_named("ft_node_watch") <= of_others, "the end of the watch")
    assert seen(asks).age_s is None, "nobody has asked meanwhile"


def test_nodes_that_look_seldom_are_not_old_early() -> None:
    """With `--ft-node-beat 10` a node hears a question after 20 s at most."""
    nodes = AskedNodes(Members(0, ["a", "b"]))
    nodes.look_s = 20.0
    found = JobNodes(nodes.rendezvous(0), SOON_S).seen()
    assert found is not None and found.old_s > 20.0 + SOON_S


def test_stacks_of_another_cycle_are_no_answer() -> None:
    """A node that had this node rank in the cycle before may have written them."""
    nodes = AskedNodes(Members(1, ["a", "c"]))
    asks = JobNodes(nodes.rendezvous(0, 1), SOON_S)
    nodes.answer(Topic.STACKS, 1, stacks_as_record(1, 0, [RankReading(1, 0, 11)]))
    found = asks.ask_stacks()()
    assert (list(found.readings), found.silent) == ([], [SilentNode(1, "c")])
    nodes.answer(Topic.STACKS, 1, stacks_as_record(2, 1, [RankReading(1, 0, 11)]))
    found = asks.ask_stacks()()
    assert [reading.rank for reading in found.readings] == [1] and found.silent == []


def test_nodes_that_the_cycle_goes_on_without_are_neither_counted_nor_waited_for() -> None:
    nodes = AskedNodes(Members(0, ["a", "b", "c"], ["d"], [2]))
    asks = JobNodes(nodes.rendezvous(0), SOON_S)
    assert asks.counts() == {"active": 2, "waiting": 1} and seen(asks).node == "b"
    nodes.answer(Topic.STACKS, 1, stacks_as_record(1, 0, []))
    assert asks.ask_stacks()().silent == []


def test_a_host_without_threads_still_shows_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = AskedNodes(Members(0, ["a", "b"]))
    asks = JobNodes(nodes.rendezvous(0), SOON_S)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        assert seen(asks).age_s is None
        assert "could not start a thread" in asks.ask_stacks()().problem
    until(lambda: seen(asks) and nodes.asked[Topic.RANKS] > 0)


class StillAsking(Asking):
    """Ranks run, and the agent's thread does not look."""

    def ask(self, limit_s: float, stacks: bool = False, collectives: bool = False) -> bool | None:
        return False


def answers_of(rendezvous: Any, asking: Asking, read_at: float = 0.0) -> NodeAnswers:
    times: Any = SimpleNamespace(now=lambda: None)
    status = NodeStatus()
    status.on_event(BEGUN, 1000.0)
    status.read([RankReading(1, 0, 11, read_at=read_at, connected=True, attached=True, sign_age_s=0.5)])
    return NodeAnswers(status, asking, times, rendezvous)


def threads_named(name: str) -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == name}


def until_answered() -> None:
    until(lambda: not threads_named("ft_node_answer"), "all questions are answered")


def test_a_node_answers_for_the_place_that_it_has() -> None:
    nodes = AskedNodes(Members(0, ["a", "b"]))
    answers = answers_of(nodes.rendezvous(1), Asking())
    for topic in Topic:
        answers.on_question(topic, 4)
    until_answered()
    stacks = stacks_of_record(nodes.written[Topic.STACKS, 1], 0.0)
    assert stacks is not None and (stacks.number, stacks.cycle, stacks.ranks) == (4, 0, ()), "no rank runs"
    ranks = ranks_of_record(nodes.written[Topic.RANKS, 1])
    assert ranks is not None and (ranks.number, ranks.cycle, len(ranks.ranks)) == (4, 0, 1)


@pytest.mark.parametrize(("rank", "cycle"), [(None, 0), (1, 1)], ids=["a spare", "its ranks have not begun"])
def test_a_node_without_ranks_of_its_place_leaves_the_key_to_another(rank: int | None, cycle: int) -> None:
    nodes = AskedNodes(Members(1, ["a", "c"], ["b"]))
    answers = answers_of(nodes.rendezvous(rank, cycle), Asking())
    for topic in Topic:
        answers.on_question(topic, 1)
    until_answered()
    assert nodes.written == {}


def test_what_is_old_is_not_said_to_be_new() -> None:
    """Where the agent's loop stands still, what was read last has its age, and is no answer to where ranks are."""
    nodes = AskedNodes(Members(0, ["a", "b"]))
    answers = answers_of(nodes.rendezvous(1), StillAsking(), read_at=time.monotonic() - 600.0)
    for topic in Topic:
        answers.on_question(topic, 1)
    until_answered()
    assert list(nodes.written) == [(Topic.RANKS, 1)]
    record = ranks_of_record(nodes.written[Topic.RANKS, 1])
    assert record is not None and record.ranks[0]["reading_age_s"] >= 600.0


def test_a_host_without_threads_does_not_end_the_thread_that_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = AskedNodes(Members(0, ["a", "b"]))
    answers = answers_of(nodes.rendezvous(1), Asking())

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        answers.on_question(Topic.RANKS, 1)
    answers.on_question(Topic.RANKS, 2)
    until_answered()
    record = ranks_of_record(nodes.written[Topic.RANKS, 1])
    assert record is not None and record.number == 2
