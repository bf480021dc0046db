"""A node's link over a real store: which answer it takes, and that no question keeps it from the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

import pytest
from torch.distributed import TCPStore

from ft_launcher.job.coordinator.formation import Rules, Size
from ft_launcher.job.coordinator.node_messages import NO_CYCLE, CycleEnd, EndReason, Formed, Left, encode
from ft_launcher.job.link.attempt import NodeSettings
from ft_launcher.job.link.coordinator_link import CutReason
from ft_launcher.job.link.coordinator_service import BEAT, end_key, reply_key
from ft_launcher.job.link.lease import Lease
from ft_launcher.job.link.node_link import NodeLink
from ft_launcher.job.store.job_store import JobStore
from rank_monitor.contract.errors import StoreLost
from rank_monitor.contract.processes.wait import readable
from tests.ft_launcher.job.nodes_of_a_test import judge, node, place
from tests.ft_launcher.job.store.test_job_store import PATIENT_S, opened, server
from tests.patience import until

__all__ = ["server"]

LEASE_S = 3.0
ANSWER = place(0, 0, 1, "the first nodes came")


@pytest.fixture
def store(server: TCPStore) -> JobStore:
    """Another node's connection."""
    return JobStore(*opened(f"127.0.0.1:{server.port}"))


@pytest.fixture
def link(store: JobStore, lease: Lease) -> Iterator[NodeLink]:
    """Of node `a`; somebody else coordinates."""
    store.set_head(encode(Formed(NO_CYCLE, "b", 1, 0, [])), None)
    store.publish({BEAT: "b"})
    link = NodeLink("a", store.another(), NodeSettings(Rules(Size(2, 2)), judge, 0.2, 60.0), lease)
    yield link
    link.close(Left("a", "the test ends"), 5.0)


@pytest.fixture
def lease() -> Iterator[Lease]:
    """That of node `a`, much shorter than it would be."""
    lease = Lease(LEASE_S)
    yield lease
    lease.close()


def test_an_answer_comes_to_whom_it_is_for(link: NodeLink, store: JobStore) -> None:
    link.ask(node("a", 1))
    store.read_inbox(0, PATIENT_S)
    store.publish({reply_key("a", 1): encode(ANSWER)})
    assert link.answer(1, PATIENT_S) == ANSWER


def test_who_asks_anew_under_another_name_is_not_held_up_by_what_it_asked_before(
    link: NodeLink, store: JobStore
) -> None:
    """As a node does whose coordinator another replaced while it waited for a place."""
    link.ask(node("a", 1))
    store.read_inbox(0, PATIENT_S)
    link.ask(node("a+", 2))
    store.read_inbox(1, PATIENT_S)
    store.publish({reply_key("a+", 2): encode(ANSWER)})
    assert link.answer(2, PATIENT_S) == ANSWER


def test_an_end_that_the_agent_does_not_take_lets_the_lease_run_out(
    link: NodeLink, lease: Lease, store: JobStore
) -> None:
    """Its beats go on: only the thread that ends the ranks hangs, in a write to a file server, say."""
    link.entered(place(0, 0, 2))
    link.is_polled = True
    store.publish({end_key(0): encode(CycleEnd(0, EndReason.FAILED, "a rank failed"))})
    assert readable([lease.fileno()], PATIENT_S), "nobody could end the ranks"
    before = store.counters(["a"], ())[0]["a"]
    until(lambda: store.counters(["a"], ())[0]["a"] != before, "a beat")


def test_a_store_that_refuses_the_last_message_holds_up_nobody(store: JobStore, lease: Lease) -> None:
    """It may have ended with its host. Until then it had answered, and the node timeout is an hour here."""

    class RefusingStore(JobStore):
        """Refuses the message by which a node leaves."""

        def post(self, text: str) -> None:
            if '"Left"' in text:
                raise StoreLost("connection refused")
            super().post(text)

    store.set_head(encode(Formed(NO_CYCLE, "b", 1, 0, [])), None)
    store.publish({BEAT: "b"})
    refusing = RefusingStore(store.backend, store.raw, store.connect, store.run_id, False)
    link = NodeLink("a", refusing, NodeSettings(Rules(Size(2, 2)), judge, 0.2, 3600.0), lease)
    assert link.trouble() is None
    closing = threading.Thread(target=link.close, args=(Left("a", "told to end", 15), 3600.0), daemon=True)
    closing.start()
    closing.join(PATIENT_S)
    assert not closing.is_alive()


def test_its_end_waits_for_the_thread_that_wakes_the_others(store: JobStore, lease: Lease) -> None:
    """A thread that is in torch's code when Python ends would abort the process."""

    class SlowStore(JobStore):
        """The thread is still there for a moment after the key is written."""

        def publish(self, texts: Mapping[str, str]) -> None:
            super().publish(texts)
            time.sleep(0.2)

    store.set_head(encode(Formed(NO_CYCLE, "b", 1, 0, [])), None)
    store.publish({BEAT: "b"})
    slow = SlowStore(store.backend, store.raw, store.connect, store.run_id, False)
    link = NodeLink("a", slow, NodeSettings(Rules(Size(2, 2)), judge, 0.2, 60.0), lease)
    link.ask(node("a", 1))
    link.close(Left("a", "the test ends"), PATIENT_S)
    assert not [thread for thread in threading.enumerate() if thread.name == "ft_wake"]


def break_sender(link: NodeLink, lease: Lease, store: JobStore) -> None:
    link.send(object())  # type: ignore[arg-type]


def break_waiter(link: NodeLink, lease: Lease, store: JobStore) -> None:
    def fail(key: str, text: bytes) -> None:
        raise KeyError("what is done with an end")

    link._ends.put = fail  # type: ignore[method-assign]
    link.entered(place(0, 0, 2))
    store.publish({end_key(0): encode(CycleEnd(0, EndReason.FAILED, "a rank failed"))})


def break_beater(link: NodeLink, lease: Lease, store: JobStore) -> None:
    def fail(sent_at: float) -> None:
        raise KeyError("what is done after an answer")

    lease.renew = fail  # type: ignore[method-assign]


@pytest.mark.parametrize("break_thread", [break_sender, break_waiter, break_beater])
def test_a_thread_that_fails_cuts_the_node_off(
    link: NodeLink,
    lease: Lease,
    store: JobStore,
    caplog: pytest.LogCaptureFixture,
    break_thread: Callable[[NodeLink, Lease, JobStore], None],
) -> None:
    break_thread(link, lease, store)
    found = until(lambda: link.cut(time.monotonic()), "the cut")
    assert found is not None and found.end_reason is CutReason.NO_ANSWER
    assert found.reason.startswith("the link to the other nodes has failed: ")
    assert "Traceback" in caplog.text
