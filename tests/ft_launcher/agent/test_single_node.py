"""The questions of a node that decides by itself to the rendezvous: when it asks, and which answers count."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ft_launcher.agent.cycle.cycle import EndedElsewhere
from ft_launcher.agent.single_node import SingleNode
from ft_launcher.job.coordinator.node_messages import EndReason
from rank_monitor.contract.processes.wait import readable
from tests.patience import patient


class Rendezvous:
    """Answers with `answer`, or raises it, once `go` is set."""

    def __init__(self, answer: int | Exception) -> None:
        self._answer = answer
        self.go = threading.Event()
        self.asked = 0

    def num_nodes_waiting(self) -> int:
        self.asked += 1
        self.go.wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def node_of(rendezvous: Rendezvous, interval_s: float, silent: Callable[[Exception], None]) -> SingleNode:
    recorder = SimpleNamespace(store_silent=silent)
    spec = SimpleNamespace(rdzv_handler=rendezvous, monitor_interval=interval_s)
    parts = SimpleNamespace(several_nodes=True, recorder=recorder)
    ranks: Any = SimpleNamespace(parts=parts, cycle=0, group=SimpleNamespace(spec=spec))
    nothing: Any = None
    return SingleNode(ranks, nothing, nothing, nothing)


def no_error(error: Exception) -> None:
    raise AssertionError(error)


def until_answered(node: SingleNode) -> None:
    assert readable(node.descriptors(), patient(10))


def test_it_is_asked_once_at_a_time_and_again_after_the_interval() -> None:
    rendezvous = Rendezvous(0)
    node = node_of(rendezvous, 3600, no_error)
    check = node.next_check()
    assert check is not None and check <= time.monotonic()
    for _ in range(3):  # other events wake the loop meanwhile
        assert node.attend(set()) == [] and node.next_check() is None
    rendezvous.go.set()
    until_answered(node)
    assert node.attend(set()) == [] and node.attend(set()) == []
    check = node.next_check()
    assert check is not None and check > time.monotonic() and node.descriptors() == set()
    assert rendezvous.asked == 1


def test_other_events_do_not_put_the_question_off() -> None:
    rendezvous = Rendezvous(0)
    node = node_of(rendezvous, 0.0, no_error)
    rendezvous.go.set()
    for asked in (1, 2, 3):
        node.attend({99})
        until_answered(node)
        node.attend({99})
        assert rendezvous.asked == asked


def test_waiting_nodes_end_the_cycle() -> None:
    rendezvous = Rendezvous(1)
    node = node_of(rendezvous, 3600, no_error)
    node.attend(set())
    rendezvous.go.set()
    until_answered(node)
    (event,) = node.attend(set())
    assert isinstance(event, EndedElsewhere) and event.end.reason is EndReason.GREW


def test_an_answer_does_not_outlive_its_cycle() -> None:
    rendezvous = Rendezvous(1)
    node = node_of(rendezvous, 3600, no_error)
    node.attend(set())
    rendezvous.go.set()
    until_answered(node)
    node._drop_question()  # as `form` does
    assert node.attend(set()) == [] and node.descriptors() == set()


def test_an_error_is_recorded_and_ends_nothing() -> None:
    errors: list[Exception] = []
    rendezvous = Rendezvous(OSError("no route"))
    node = node_of(rendezvous, 3600, errors.append)
    node.attend(set())
    rendezvous.go.set()
    until_answered(node)
    assert node.attend(set()) == [] and [str(error) for error in errors] == ["no route"]
