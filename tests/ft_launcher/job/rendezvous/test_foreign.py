"""A node under a handler that is not ours: when it asks the handler, which answers count, and the numbers of cycles."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

from torch.distributed import HashStore

from ft_launcher.decide.policy.job_policy import JobPolicy
from ft_launcher.job.coordinator.formation import Rules, Size
from ft_launcher.job.coordinator.node_messages import EndReason, JoinRequest
from ft_launcher.job.link.attempt import NodeSettings
from ft_launcher.job.rendezvous.cycle_store import PortHolder
from ft_launcher.job.rendezvous.foreign import ForeignRendezvous
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.settings.config import RestartSettings
from tests.patience import patient


class Handler:
    """Gives rank 0 of 2; answers with `answer`, or raises it, once `go` is set."""

    use_agent_store = True

    def __init__(self, answer: int | Exception = 0) -> None:
        self._answer = answer
        self._store = HashStore()
        self.go = threading.Event()
        self.asked = 0

    def get_backend(self) -> str:
        return "theirs"

    def get_run_id(self) -> str:
        return "job"

    def next_rendezvous(self) -> Any:
        info = SimpleNamespace(master_addr="127.0.0.1", master_port=0)
        return SimpleNamespace(store=self._store, rank=0, world_size=2, bootstrap_store_info=info)

    def num_nodes_waiting(self) -> int:
        self.asked += 1
        self.go.wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def node_of(handler: Any, poll_s: float = 3600.0) -> ForeignRendezvous:
    """Its node, in its first cycle."""
    settings = NodeSettings(Rules(Size(1, 1)), JobPolicy(RestartSettings(), 3), 1.0, 15.0)
    me = JoinRequest("a", 0, "a", "", 2)
    node = ForeignRendezvous(handler, me, settings, PortHolder("127.0.0.1", None, None), poll_s)
    node.ask(node.link)
    assert node.answered() is not None
    node.next_rendezvous()
    return node


def until_answered(node: ForeignRendezvous) -> None:
    assert readable(node.descriptors(), patient(10))


def test_it_is_asked_once_at_a_time_and_again_after_the_interval() -> None:
    handler = Handler()
    node = node_of(handler)
    check = node.next_check()
    assert check is not None and check <= time.monotonic()
    for _ in range(3):  # other events wake the loop meanwhile
        node.poll(set())
        assert node.pop_end() is None and node.next_check() is None
    handler.go.set()
    until_answered(node)
    for _ in range(2):
        node.poll(set())
        assert node.pop_end() is None
    check = node.next_check()
    assert check is not None and check > time.monotonic() and node.descriptors() == set()
    assert handler.asked == 1


def test_other_events_do_not_put_the_question_off() -> None:
    handler = Handler()
    node = node_of(handler, 0.0)
    handler.go.set()
    for asked in (1, 2, 3):
        node.poll({99})
        until_answered(node)
        node.poll({99})
        assert handler.asked == asked


def test_waiting_nodes_end_the_cycle() -> None:
    handler = Handler(1)
    node = node_of(handler)
    node.poll(set())
    handler.go.set()
    until_answered(node)
    node.poll(set())
    end = node.pop_end()
    assert end is not None and (end.reason, end.text) == (EndReason.GREW, "other nodes wait to take part")
    node.ask(node.link)
    place = node.answered()
    assert place is not None and place.cycle == 1 and place.judgement is None


def test_an_answer_does_not_outlive_its_cycle() -> None:
    handler = Handler(1)
    node = node_of(handler)
    node.poll(set())
    handler.go.set()
    until_answered(node)
    node.report_end(EndReason.FAILED, "a rank failed")
    node.ask(node.link)
    node.poll(set())
    assert node.pop_end() is None or node.descriptors() == set()


def test_an_error_is_told_and_ends_nothing() -> None:
    handler = Handler(OSError("no route"))
    node = node_of(handler)
    node.poll(set())
    handler.go.set()
    until_answered(node)
    node.poll(set())
    assert node.pop_end() is None and str(node.trouble()) == "no route"
    node.poll(set())
    assert node.trouble() is None


def test_each_cycle_has_a_number_and_a_store() -> None:
    node = node_of(Handler())
    first = node.cycle_store
    node.next_rendezvous()
    second = node.cycle_store
    assert first is not None and second is not None
    assert (first.cycle, second.cycle) == (0, 1) and first.port != second.port
    assert node.names() == ([], []) and not node.numbers_ranks and not node.follows_requests
