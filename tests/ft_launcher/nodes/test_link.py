"""A node's link over a real store: which answer it takes, and that no question keeps it from the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore

from ft_launcher.nodes.coordination import BEAT, reply_key
from ft_launcher.nodes.job_store import JobStore
from ft_launcher.nodes.link import Link
from ft_launcher.nodes.messages import NO_CYCLE, Formed, Gone, encode
from tests.ft_launcher.nodes.nodes_of_a_test import node
from tests.ft_launcher.nodes.test_job_store import PATIENT_S, opened, server

__all__ = ["server"]


@pytest.fixture
def store(server: TCPStore) -> JobStore:
    """Another node's connection."""
    return JobStore(*opened(f"127.0.0.1:{server.port}"))


@pytest.fixture
def link(store: JobStore) -> Iterator[Link]:
    """Of node `a`; somebody else coordinates."""
    store.set_head(encode(Formed(NO_CYCLE, "b", 1, 0, [])), None)
    store.publish({BEAT: "b"})
    link = Link("a", store.another(), lambda term: None, beat_s=0.2, timeout_s=60.0)
    yield link
    link.close(Gone("a", "the test ends"), 5.0)


def test_an_answer_comes_to_whom_it_is_for(link: Link, store: JobStore) -> None:
    link.ask(node("a", 1))
    store.read_inbox(0, PATIENT_S)
    store.publish({reply_key("a", 1): "yes"})
    assert link.answer(1, PATIENT_S) == b"yes"


def test_who_asks_anew_under_another_name_is_not_held_up_by_what_it_asked_before(link: Link, store: JobStore) -> None:
    """As a node does whose coordinator another replaced while it waited for a place."""
    link.ask(node("a", 1))
    store.read_inbox(0, PATIENT_S)
    link.ask(node("a+", 2))
    store.read_inbox(1, PATIENT_S)
    store.publish({reply_key("a+", 2): "yes"})
    assert link.answer(2, PATIENT_S) == b"yes"
