"""Whoever is to take over from the coordinator looks when it should, over torch's own store."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from ft_launcher.nodes.coordination import BEAT, TERM
from ft_launcher.nodes.job_store import JobStore
from ft_launcher.nodes.watch import Watch

BEAT_S, TIMEOUT_S = 0.001, 3600.0


@pytest.fixture
def store() -> JobStore:
    return JobStore(None, HashStore(), lambda: (None, None), "job", False)


def test_a_new_coordinator_is_given_the_whole_timeout_by_those_that_look_seldom(store: JobStore) -> None:
    """At the first look the term is news, and the coordinator may not have beaten yet."""
    watch = Watch(BEAT_S, TIMEOUT_S)
    for term in ("1", "2"):
        store.publish({TERM: term})
        watch.next_look = 0.0
        assert watch.is_due()
        assert watch.silent_term(store) is None
        assert not watch.is_due(), "a second look at once would find no news, which is a loss to them"


def test_a_deputy_looks_often_and_finds_the_loss(store: JobStore) -> None:
    watch = Watch(BEAT_S, 6 * BEAT_S)
    watch.period_s = BEAT_S
    store.publish({TERM: "3"})
    store.beat(BEAT)
    seen = [watch.silent_term(store)]
    while seen[-1] is None:
        seen.append(watch.silent_term(store))
    assert len(seen) > 1 and seen[-1] == 3
