"""Keys that a node awaits, over a real store: each comes to whom it is for, and a dead connection holds up none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from ft_launcher.job.link.connections import Connections
from ft_launcher.job.link.key_waiter import Awaited, PollableValueQueue, ValueQueue
from ft_launcher.job.store.job_store import JobStore
from rank_monitor.contract.processes.wait import readable
from tests.ft_launcher.job.store.test_job_store import PATIENT_S, opened, server

__all__ = ["server"]


@pytest.fixture
def store(server: TCPStore) -> JobStore:
    """Whoever writes the keys."""
    return JobStore(*opened(f"127.0.0.1:{server.port}"))


@pytest.fixture
def values() -> ValueQueue:
    """Of keys that the node alone awaits."""
    return ValueQueue(ours=True)


@pytest.fixture
def awaited(store: JobStore, values: ValueQueue) -> Iterator[Awaited]:
    """What a node awaits."""
    connections = Connections(store.another(), pause_s=0.1)
    awaited = Awaited(connections, lambda error: pytest.fail(str(error)))
    yield awaited
    connections.closed.set()
    awaited.close()
    awaited.release(store, values)
    awaited.thread.join(PATIENT_S)
    assert not awaited.thread.is_alive()


def test_all_that_is_there_is_found_whatever_the_thread_waits_for(
    awaited: Awaited, store: JobStore, values: ValueQueue
) -> None:
    """As when its connection died unheard in an earlier wait."""
    awaited.expect("never", values)
    awaited.expect("now", values)
    store.publish({"now": "yes"})
    awaited.check(store)
    assert values.pop("now", PATIENT_S) == b"yes"


def test_a_wait_that_heard_nothing_of_its_key_goes_on_with_a_new_connection(
    awaited: Awaited, store: JobStore, values: ValueQueue
) -> None:
    stuck = awaited.thread
    awaited.expect("lost", values)
    awaited.expect("next", values)
    other = PrefixStore("elsewhere/", store.raw)  # what a look finds there, the thread is never told of
    elsewhere = JobStore(*_connection(other), lambda: _connection(other), "", False)
    elsewhere.publish({"lost": "yes"})
    awaited.check(elsewhere)
    assert values.pop("lost", PATIENT_S) == b"yes"
    assert awaited.thread is not stuck
    store.publish({"lost": "yes", "next": "too"})
    assert values.pop("next", PATIENT_S) == b"too"
    stuck.join(PATIENT_S)
    assert not stuck.is_alive()


class _Late(JobStore):
    """A connection on which the answer to a look arrives when the thread that waits has received the value, too."""

    values: ValueQueue

    def receive(self, key: str, limit_s: float) -> bytes | None:
        self.publish({key: "yes"})
        assert self.values.pop(key, PATIENT_S) == b"yes"
        return b"yes"


def test_a_value_that_is_received_during_the_look_for_it_starts_no_other_thread(
    awaited: Awaited, server: TCPStore, values: ValueQueue
) -> None:
    late = _Late(*opened(f"127.0.0.1:{server.port}"))
    late.values = values
    waits = awaited.thread
    awaited.expect("now", values)
    awaited.check(late)
    assert awaited.thread is waits


def test_only_what_was_expected_earlier_in_its_queue_is_let_go(
    awaited: Awaited, store: JobStore, values: ValueQueue
) -> None:
    shared = PollableValueQueue()
    for key in ("first", "second", "third"):
        awaited.expect(key, values)
    awaited.expect("of all", shared)
    awaited.release(store, values, before="first")
    awaited.release(store, values, before="unknown")
    assert store.receive("first", 0) is None
    awaited.release(store, values, before="second")
    assert values.pop("first", PATIENT_S) == b""
    store.publish({"second": "2", "third": "3"})
    assert [values.pop(key, PATIENT_S) for key in ("second", "third")] == [b"2", b"3"]
    assert store.receive("of all", 0) is None
    store.publish({"of all": "4"})
    assert readable([shared.fileno()], PATIENT_S) and shared.pop("of all", PATIENT_S) == b"4"


def _connection(store: Store) -> tuple[object, Store]:
    return None, store
