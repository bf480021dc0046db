"""What a node answers about its ranks: only while it has a place of the cycle that they run in, and nothing old."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ft_launcher.agent.node_answers import NodeAnswers
from ft_launcher.nodes.node_messages import Members
from ft_launcher.nodes.questions import Topic
from ft_launcher.record import events
from ft_launcher.status.asking import Asking
from ft_launcher.status.node_record import ranks_of_record, stacks_of_record
from ft_launcher.status.node_status import NodeStatus, RankReading
from tests.ft_launcher.agent.asked_nodes import AskedNodes
from tests.ft_launcher.nodes.site import until

BEGUN = events.CycleStart(0, 1, 2, "host:1", [])


class StillAsking(Asking):
    """Ranks run, and the agent's thread does not look."""

    def ask(self, limit_s: float, stacks: bool = False, collectives: bool = False) -> bool | None:
        return False


def answers_of(rendezvous: Any, asking: Asking, read_at: float = 0.0) -> NodeAnswers:
    parts: Any = SimpleNamespace(status=NodeStatus(), asking=asking)
    parts.status.on_event(BEGUN, 1000.0)
    parts.status.read([RankReading(1, 0, 11, read_at=read_at, connected=True, attached=True, sign_age_s=0.5)])
    return NodeAnswers(parts, rendezvous)


def until_answered(answers: NodeAnswers) -> None:
    until(lambda: not answers._is_answering)


def test_a_node_answers_for_the_place_that_it_has() -> None:
    nodes = AskedNodes(Members(0, ["a", "b"]))
    answers = answers_of(nodes.rendezvous(1), Asking())
    for topic in Topic:
        answers.heard(topic, 4)
    until_answered(answers)
    stacks = stacks_of_record(nodes.written[Topic.STACKS, 1], 0.0)
    assert stacks is not None and (stacks.number, stacks.cycle, stacks.readings) == (4, 0, ()), "no rank runs"
    ranks = ranks_of_record(nodes.written[Topic.RANKS, 1])
    assert ranks is not None and (ranks.number, ranks.cycle, len(ranks.ranks)) == (4, 0, 1)


@pytest.mark.parametrize(("rank", "cycle"), [(None, 0), (1, 1)], ids=["a spare", "its ranks have not begun"])
def test_a_node_without_ranks_of_its_place_leaves_the_key_to_another(rank: int | None, cycle: int) -> None:
    nodes = AskedNodes(Members(1, ["a", "c"], ["b"]))
    answers = answers_of(nodes.rendezvous(rank, cycle), Asking())
    for topic in Topic:
        answers.heard(topic, 1)
    until_answered(answers)
    assert nodes.written == {}


def test_what_is_old_is_not_said_to_be_new() -> None:
    """Where the agent's loop stands still, what was read last has its age, and is no answer to where ranks are."""
    nodes = AskedNodes(Members(0, ["a", "b"]))
    answers = answers_of(nodes.rendezvous(1), StillAsking(), read_at=time.monotonic() - 600.0)
    for topic in Topic:
        answers.heard(topic, 1)
    until_answered(answers)
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
        answers.heard(Topic.RANKS, 1)
    answers.heard(Topic.RANKS, 2)
    until_answered(answers)
    record = ranks_of_record(nodes.written[Topic.RANKS, 1])
    assert record is not None and record.number == 2
