"""Keys that a node awaits, over a real store: each comes to whom it is for, and none holds up those after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore

from ft_launcher.nodes.awaited import Awaited
from ft_launcher.nodes.job_store import JobStore
from ft_launcher.nodes.lines import Lines
from tests.ft_launcher.nodes.test_job_store import PATIENT_S, opened, server

__all__ = ["server"]


@pytest.fixture
def store(server: TCPStore) -> JobStore:
    """Whoever writes the keys."""
    return JobStore(*opened(f"127.0.0.1:{server.port}"))


@pytest.fixture
def awaited(store: JobStore) -> Iterator[Awaited]:
    """Of a node that alone awaits these keys."""
    lines = Lines(store.another(), rest_s=0.1)
    awaited = Awaited("test", lines, ours=True)
    yield awaited
    lines.closed.set()
    awaited.close()
    awaited.let_go(store)
    awaited.thread.join(PATIENT_S)
    assert not awaited.thread.is_alive()


def test_what_is_looked_for_is_what_was_expected_last_whatever_the_thread_waits_for(
    awaited: Awaited, store: JobStore
) -> None:
    """As when its connection died unheard in an earlier wait."""
    awaited.expect("never")
    awaited.expect("now")
    store.publish({"now": "yes"})
    awaited.look(store)
    assert awaited.take("now", PATIENT_S) == b"yes"


def test_only_what_was_expected_earlier_is_let_go(awaited: Awaited, store: JobStore) -> None:
    for key in ("first", "second", "third"):
        awaited.expect(key)
    awaited.let_go(store, before="first")
    awaited.let_go(store, before="unknown")
    assert store.receive("first", 0) is None
    awaited.let_go(store, before="second")
    assert awaited.take("first", PATIENT_S) == b""
    store.publish({"second": "2", "third": "3"})
    assert [awaited.take(key, PATIENT_S) for key in ("second", "third")] == [b"2", b"3"]
