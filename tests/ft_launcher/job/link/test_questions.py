"""What nodes ask each other, over a real store: every node hears it, and each has its own answer."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from ft_launcher.job.coordinator.node_messages import EndReason, Members
from ft_launcher.job.link.questions import COUNTERS, Questions, Topic, counter_key, waits_key
from ft_launcher.job.rendezvous.handler import NoPlace
from tests.ft_launcher.job.site import PATIENT_S, Site, site

both = pytest.mark.parametrize("hosted", [True, False], ids=["hosted", "apart"])


def questions(made: Site, name: str) -> Questions:
    found = made.nodes[name].questions
    assert found is not None
    return found


@both
def test_every_node_hears_a_question_and_answers_for_itself(hosted: bool) -> None:
    with site(3, 3, hosted) as made:
        made.form("abc", begin=True)
        heard: queue.SimpleQueue[tuple[str, Topic, int]] = queue.SimpleQueue()
        for name in "ac":
            questions(made, name).on_question = lambda topic, number, name=name: heard.put((name, topic, number))  # type: ignore[misc]
        assert questions(made, "b").ask(Topic.STACKS) == 1
        assert {heard.get(timeout=PATIENT_S) for _ in "ac"} == {(name, Topic.STACKS, 1) for name in "ac"}
        asker = questions(made, "b")
        questions(made, "c").answer(Topic.STACKS, 2, "here")
        assert asker.answers(Topic.STACKS, [0, 2]) == {2: b"here"}
        questions(made, "c").answer(Topic.STACKS, 2, "still here")
        assert asker.answers(Topic.STACKS, [0, 1, 2]) == {2: b"still here"}
        assert asker.answers(Topic.RANKS, [0, 1, 2]) == {}


def test_a_node_hears_no_question_of_its_own() -> None:
    counters = dict.fromkeys(COUNTERS, 0)

    def count(key: str) -> int:
        counters[key] += 1
        return counters[key]

    store = SimpleNamespace(count=count)
    connections: Any = SimpleNamespace(shared=SimpleNamespace(open=lambda: store))
    asker, heard = Questions(connections, 1.0), list[tuple[Topic, int]]()
    asker.on_question = lambda topic, number: heard.append((topic, number))

    def check() -> None:
        asker.note([str(number).encode() for number in counters.values()])

    assert asker.ask(Topic.STACKS) == 1
    check()
    assert heard == []
    count(counter_key(Topic.STACKS))
    assert asker.ask(Topic.STACKS) == 3
    check()
    assert heard == [(Topic.STACKS, 3)], "another node has asked before"


@both
def test_who_takes_part_and_who_waits_can_be_read(hosted: bool) -> None:
    with site(2, 2, hosted) as made:
        made.form("ab", begin=True)
        first = questions(made, "a").members()
        assert first is not None and (first.cycle, len(first.active), first.waiting) == (0, 2, [])
        spare = made.begin("s")
        node = made.nodes["s"].node
        store = made.store()
        assert store.receive(waits_key(node), PATIENT_S) == b"0"
        later = questions(made, "b").members()
        assert isinstance(later, Members) and (later.active, len(later.waiting)) == (first.active, 1)
        assert made.nodes[made.coordinator()].members() == later
        assert store.receive(waits_key(made.nodes["a"].node), 0) is None
        for name in "ab":
            made.nodes[name].report_end(EndReason.SUCCEEDED, "")
        with pytest.raises(NoPlace):
            spare.result(PATIENT_S)


def test_a_node_that_has_left_touches_the_store_no_more() -> None:
    with site(2, 2, hosted=False) as made:
        made.form("ab", begin=True)
        left = questions(made, "b")
        made.nodes["b"].leave("the test ends", 1.0)
        left.answer(Topic.STACKS, 1, "late")
        assert made.nodes["b"].questions is None and left.ask(Topic.STACKS) is None and left.members() is None
        assert questions(made, "a").answers(Topic.STACKS, [1]) == {}
