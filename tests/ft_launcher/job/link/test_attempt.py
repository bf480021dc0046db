"""Attempts of a job over a real TCPStore apart from its nodes: who opens the next, what is removed, who hears what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch.distributed import HashStore, TCPStore

from ft_launcher.job.coordinator.formation import Rules, Size
from ft_launcher.job.coordinator.node_messages import Formed, JobOver, Left, decode
from ft_launcher.job.coordinator.node_messages import encode as text_of
from ft_launcher.job.link.attempt import (
    AttemptEnded,
    CoordinatorWatch,
    NodeSettings,
    become_coordinator,
    check,
    enter_current,
)
from ft_launcher.job.link.coordinator_service import BEAT, TERM, CoordinatorService
from ft_launcher.job.link.lease import Lease
from ft_launcher.job.link.node_link import NodeLink
from ft_launcher.job.store.job_store import JobStore
from tests.ft_launcher.job.nodes_of_a_test import judge, node
from tests.ft_launcher.job.store.test_job_store import PATIENT_S, opened, server

__all__ = ["server"]

BEAT_S, TIMEOUT_S = 0.1, 60.0
OVER = JobOver(7, "it failed")
LOST = 82


SETTINGS = NodeSettings(Rules(Size(2, 2)), judge, BEAT_S, TIMEOUT_S)


@pytest.fixture
def store(server: TCPStore) -> JobStore:
    """A connection without an attempt."""
    return JobStore(*opened(f"127.0.0.1:{server.port}"))


@pytest.fixture
def work() -> Iterator[list[CoordinatorService]]:
    """Where a test puts its coordinators, which end with it."""
    begun: list[CoordinatorService] = []
    yield begun
    for one in begun:
        one.close()


def begin(work: list[CoordinatorService], name: str, store: JobStore) -> JobStore:
    """Opens an attempt on a connection of its own, which is returned."""
    own = store.another()
    coordination = become_coordinator(name, SETTINGS, own, 0)
    assert coordination is not None
    work.append(coordination)
    return own


def end(work: list[CoordinatorService], store: JobStore) -> None:
    """The current attempt is over, and its coordinator gone."""
    work.pop().close()
    for thread in threading.enumerate():
        if thread.name == "ft_wake":  # it posts a message, perhaps when the next attempt has removed the inbox
            thread.join(PATIENT_S)
    head = store.head()
    assert head is not None
    formed = decode(head.value)
    assert isinstance(formed, Formed)
    assert store.set_head(text_of(replace(formed, over=OVER)), head)


def test_who_comes_joins_the_attempt_that_goes_on(store: JobStore, work: list[CoordinatorService]) -> None:
    assert not enter_current(store)
    first = begin(work, "a", store)
    assert enter_current(store) and store.attempt == first.attempt
    assert become_coordinator("b", SETTINGS, store.another(), 0) is None
    assert store.another().attempt == first.attempt


def test_one_of_many_opens_the_next_attempt(store: JobStore, work: list[CoordinatorService]) -> None:
    begin(work, "a", store)
    end(work, store)
    assert not enter_current(store)
    starts = threading.Barrier(6)

    def race(name: str) -> None:
        own = store.another()
        starts.wait(PATIENT_S)
        if (won := become_coordinator(name, SETTINGS, own, 0)) is not None:
            work.append(won)

    threads = [threading.Thread(target=race, args=(name,)) for name in "bcdefg"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENT_S)
    assert len(work) == 1
    assert enter_current(store)


def test_the_next_attempt_removes_what_the_last_one_left(
    store: JobStore, server: TCPStore, work: list[CoordinatorService]
) -> None:
    if not hasattr(server, "list_keys"):
        pytest.skip("this release of torch cannot list the keys of a store")
    first = begin(work, "a", store)
    first.beat("a")
    first.post("a message")
    server.set("ft_launcher/another job/key", "")
    end(work, store)
    second = begin(work, "b", store)
    kept = {key.rpartition("/")[0] for key in server.list_keys() if key.startswith("ft_launcher/")}
    kept.remove("ft_launcher")  # the id of the store's first job
    assert kept == {"ft_launcher/another job", f"ft_launcher/job/{second.attempt}"}


def test_nodes_of_the_last_attempt_hear_its_end(store: JobStore, work: list[CoordinatorService]) -> None:
    first = begin(work, "a", store)
    timeout_s = TIMEOUT_S / 12  # it looks for another attempt every four of them, where its counter is not removed
    late = NodeLink("b", store.another(), replace(SETTINGS, timeout_s=timeout_s), Lease(timeout_s))
    late.ask(node("b", 1))
    first.receive("beat/b", PATIENT_S)
    end(work, store)
    begin(work, "c", store)
    try:
        assert late.answer(1, PATIENT_S) == OVER
    finally:
        late.close(Left("b", "the test ends"), 5.0)


@pytest.mark.parametrize("removed", [True, False], ids=["lost", "replaced twice"])
def test_an_attempt_nobody_knows_of_any_more_ends_as_one_whose_store_is_lost(
    store: JobStore, server: TCPStore, work: list[CoordinatorService], removed: bool
) -> None:
    first = begin(work, "a", store)
    check(first)
    end(work, store)
    if removed:
        server.delete_key("torch.rendezvous.job")
        first = (fresh := JobStore(*opened(f"127.0.0.1:{server.port}")))
        fresh.enter("gone")
    else:
        begin(work, "b", store)
        end(work, store)
        begin(work, "c", store)
    with pytest.raises(AttemptEnded) as told:
        check(first)
    assert told.value.over.exit_code == LOST
    with pytest.raises(AttemptEnded):
        become_coordinator("d", SETTINGS, first, 1)


def test_a_record_that_is_gone_is_written_again(
    store: JobStore, server: TCPStore, work: list[CoordinatorService]
) -> None:
    begin(work, "a", store)
    before = store.head()
    assert before is not None
    server.delete_key("torch.rendezvous.job")
    fresh = JobStore(*opened(f"127.0.0.1:{server.port}"))
    assert fresh.head() is None
    assert enter_current(store) is False
    for name in "ab":  # the second node forms a cycle, which has to be written down
        fresh.enter(decode_attempt(before.value))
        fresh.post(text_of(node(name, 1)))
    assert fresh.receive("reply/a/1", PATIENT_S)
    assert enter_current(store)


def decode_attempt(value: bytes) -> str:
    formed = decode(value)
    assert isinstance(formed, Formed)
    return formed.attempt


# The watch over the coordinator by a node that may have to replace it.

SHORT_S, LONG_S = 0.001, 3600.0


@pytest.fixture
def own_store() -> JobStore:
    """torch's store within this process."""
    return JobStore(None, HashStore(), lambda: (None, None), "job", False)


def test_a_new_coordinator_is_given_the_whole_timeout_by_those_that_look_seldom(own_store: JobStore) -> None:
    """At the first look the term is news, and the coordinator may not have beaten yet."""
    watch = CoordinatorWatch(SHORT_S, LONG_S)
    for term in ("1", "2"):
        own_store.publish({TERM: term})
        watch.next_look = 0.0
        assert watch.is_due()
        assert watch.lost_term(own_store) is None
        assert not watch.is_due(), "a second look at once would find no news, which is a loss to them"


def test_a_deputy_looks_often_and_finds_the_loss(own_store: JobStore) -> None:
    watch = CoordinatorWatch(SHORT_S, 6 * SHORT_S)
    watch.period_s = SHORT_S
    own_store.publish({TERM: "3"})
    own_store.beat(BEAT)
    seen = [watch.lost_term(own_store)]
    while seen[-1] is None:
        seen.append(watch.lost_term(own_store))
    assert len(seen) > 1 and seen[-1] == 3


@pytest.mark.parametrize("term", ["", "garbage", "9" * 30, "-5"])
def test_a_term_that_no_coordinator_wrote_is_the_first(own_store: JobStore, term: str) -> None:
    watch = CoordinatorWatch(SHORT_S, 6 * SHORT_S)
    watch.period_s = SHORT_S
    own_store.publish({TERM: term})
    own_store.beat(BEAT)
    lost = watch.lost_term(own_store)
    while lost is None:
        lost = watch.lost_term(own_store)
    assert lost == 1
