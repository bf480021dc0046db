"""What is answered of the whole job by a launcher that can ask the other nodes, and by one that cannot."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ft_launcher.record import events
from ft_launcher.tools.status.answers import Answers
from ft_launcher.tools.status.asking import Asking, NodeSeen, OthersSeen, OtherStacks, SilentNode
from ft_launcher.tools.status.node_status import NodeStatus, RankReading
from rank_monitor.contract.processes.wait import readable

STILL = ("train.py:5 in step",)


class Others:
    """One node that answers, and one that does not."""

    def ask_stacks(self) -> Callable[[], OtherStacks]:
        readings = [RankReading(rank, -1, 0, frames=STILL) for rank in (1, 2, 3)]
        return lambda: OtherStacks(readings, [SilentNode(2, "host-c")])

    def counts(self) -> dict[str, int]:
        return {"active": 3, "waiting": 1}

    def seen(self) -> OthersSeen:
        rank: dict[str, Any] = {"rank": 2, "state": "training", "iteration": 7, "sign_age_s": 1.0, "reading_age_s": 0.5}
        rank["sections"] = {"data": 2.0}
        return OthersSeen([NodeSeen(1, "host-b", 4.0, [rank]), NodeSeen(2, "host-c")], ["host-d"], old_s=3.0)


@contextlib.contextmanager
def launcher(nodes: int, others: Others | None) -> Iterator[Answers]:
    """Of a node with the ranks 0 and 1, whose agent's thread attends to what is asked."""
    status, asking = NodeStatus(), Asking()
    asking.other_nodes = others
    status.on_event(events.JobStartEvent("train-7", "host-a", ["train.py"], 3, 2, {}), 1000.0)
    status.on_event(events.CycleStartEvent(0, 0, nodes, "host-a:1", []), 1001.0)
    status.read([RankReading(rank, rank, 10 + rank, frames=STILL) for rank in range(2)])
    asking.set_active(True)
    over = threading.Event()

    def attend() -> None:
        while not over.is_set():
            if readable([asking.fileno()], 0.1):
                asking.answer(asking.drain()[0])

    thread = threading.Thread(target=attend)
    thread.start()
    try:
        yield Answers(status, asking, lambda: None, {}, "1", lambda: None)
    finally:
        over.set()
        thread.join()
        asking.close()


def stacks(answers: Answers, **query: str) -> dict[str, Any]:
    answer = answers.of_user("/stacks", query)
    assert answer.code == 200, answer.body
    found: dict[str, Any] = json.loads(answer.body)
    return found


def test_stacks_of_all_nodes_are_merged_and_silent_nodes_are_named() -> None:
    with launcher(3, Others()) as answers:
        found = stacks(answers, all="1")
        assert [group["ranks"] for group in found["groups"]] == [[0, 1, 2, 3]], "each rank is in it once"
        assert (found["silent"], found["problem"]) == ([{"node_rank": 2, "node": "host-c"}], "")
        assert [group["ranks"] for group in stacks(answers)["groups"]] == [[0, 1]]


@pytest.mark.parametrize(("nodes", "problem"), [(1, ""), (2, "the job's rendezvous is not one over which")])
def test_a_node_that_cannot_ask_others_shows_its_own_ranks(nodes: int, problem: str) -> None:
    with launcher(nodes, None) as answers:
        found = stacks(answers, all="1")
        assert [group["ranks"] for group in found["groups"]] == [[0, 1]] and found["silent"] == []
        assert found["problem"].startswith(problem) and bool(found["problem"]) == bool(problem)


def test_the_status_of_the_coordinator_has_all_nodes() -> None:
    with launcher(3, Others()) as answers:
        found = json.loads(answers.of_everything("/status.json", {}).body)
    assert len(found["ranks"]) == 2, "those of its own node"
    heard, silent = found["other_nodes"]
    assert (heard["node_rank"], heard["node"], heard["age_s"], heard["is_old"]) == (1, "host-b", 4.0, True)
    (rank,) = heard["ranks"]
    assert (rank["sign_age_s"], rank["reading_age_s"], rank["sections"]) == (5.0, 4.5, {"data": 6.0}), "as of now"
    assert silent == {"node_rank": 2, "node": "host-c", "age_s": None, "is_old": False, "ranks": []}
    assert found["waiting_nodes"] == ["host-d"]


def test_nodes_are_counted_by_the_coordinator() -> None:
    with launcher(3, Others()) as answers:
        text = answers.of_metrics("/metrics", {}).body.decode()
    assert 'ft_launcher_nodes{state="active"} 3.0\n' in text and 'ft_launcher_nodes{state="waiting"} 1.0\n' in text
    with launcher(2, None) as answers:
        text = answers.of_metrics("/metrics", {}).body.decode()
    assert 'ft_launcher_nodes{state="active"} 2.0\n' in text, "a rendezvous that is not ours"


def test_a_node_that_waits_as_a_spare_is_ready() -> None:
    status, asking = NodeStatus(), Asking()
    answers = Answers(status, asking, lambda: None, {}, "1", lambda: None)
    status.on_event(events.JobStartEvent("train-7", "host-a", ["train.py"], 3, 2, {}), 1000.0)
    assert answers.of_metrics("/readyz", {}).body == b"starting\n"
    status.waits(True)
    assert (answers.of_metrics("/readyz", {}).code, answers.of_metrics("/readyz", {}).body) == (200, b"ok\n")
    found = json.loads(answers.of_everything("/status.json", {}).body)
    assert (found["state"], found["sentence"]) == ("waiting", "waits for a place, as a spare")
    status.waits(False)
    assert answers.of_metrics("/readyz", {}).body == b"starting\n", "it has a place, and its ranks do not run yet"
    status.waits(True)
    status.on_event(events.CycleStartEvent(0, 0, 1, "host:1", []), 1001.0)
    status.waits(True)
    assert answers.of_metrics("/readyz", {}).code == 200
    assert json.loads(answers.of_everything("/status.json", {}).body)["state"] == "running", "said late"
    status.on_event(events.JobEndEvent(0, "the job is over", 0, 0, 0), 1002.0)
    assert answers.of_metrics("/readyz", {}).body == b"ended\n"
    asking.close()


def test_the_status_of_another_node_has_its_own() -> None:
    with launcher(3, None) as answers:
        found = json.loads(answers.of_everything("/status.json", {}).body)
    assert found["other_nodes"] is found["waiting_nodes"] is None
