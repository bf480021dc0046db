"""What is shown of other nodes: answers to questions of this watch and this cycle, and nothing else."""

from __future__ import annotations

import threading

import pytest

from ft_launcher.agent.job_nodes import JobNodes
from ft_launcher.nodes.node_messages import Members
from ft_launcher.nodes.questions import Topic
from ft_launcher.status.asking import NodeSeen, SilentNode
from ft_launcher.status.node_record import ranks_as_record, stacks_as_record
from ft_launcher.status.node_status import RankReading
from tests.ft_launcher.agent.asked_nodes import AskedNodes
from tests.ft_launcher.nodes.site import until

SOON_S = 0.02
"""How often nodes are asked here (seconds)."""


def seen(asks: JobNodes) -> NodeSeen:
    found = asks.seen()
    assert found is not None
    (node,) = found.nodes
    return node


def test_only_answers_to_questions_of_this_watch_are_shown() -> None:
    nodes = AskedNodes(Members(0, ["a", "b"]))
    nodes.asked[Topic.RANKS] = 7
    nodes.answer(Topic.RANKS, 1, ranks_as_record(7, 0, []))
    asks = JobNodes(nodes.rendezvous(0), SOON_S)
    assert seen(asks).age_s is None
    until(lambda: seen(asks) and nodes.asked[Topic.RANKS] >= 10)
    assert seen(asks).age_s is None, "who knows how old that is"
    nodes.answer(Topic.RANKS, 1, ranks_as_record(8, 0, []))
    until(lambda: seen(asks).age_s is not None)
    with asks._lock:
        asks._wanted_at = 0.0
    until(lambda: not asks._is_watching)
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
