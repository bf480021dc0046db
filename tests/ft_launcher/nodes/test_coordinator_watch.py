"""How a node watches the coordinator that it may have to replace."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from ft_launcher.nodes.coordinator_service import BEAT, TERM
from ft_launcher.nodes.coordinator_watch import CoordinatorWatch
from ft_launcher.nodes.job_store import JobStore

BEAT_S, TIMEOUT_S = 0.001, 3600.0


@pytest.fixture
def own_store() -> JobStore:
    """torch's store within this process."""
    return JobStore(None, HashStore(), lambda: (None, None), "job", False)


def test_a_new_coordinator_is_given_the_whole_timeout_by_those_that_look_seldom(own_store: JobStore) -> None:
    """At the first look the term is news, and the coordinator may not have beaten yet."""
    watch = CoordinatorWatch(BEAT_S, TIMEOUT_S)
    for term in ("1", "2"):
        own_store.publish({TERM: term})
        watch.next_look = 0.0
        assert watch.is_due()
        assert watch.lost_term(own_store) is None
        assert not watch.is_due(), "a second look at once would find no news, which is a loss to them"


def test_a_deputy_looks_often_and_finds_the_loss(own_store: JobStore) -> None:
    watch = CoordinatorWatch(BEAT_S, 6 * BEAT_S)
    watch.period_s = BEAT_S
    own_store.publish({TERM: "3"})
    own_store.beat(BEAT)
    seen = [watch.lost_term(own_store)]
    while seen[-1] is None:
        seen.append(watch.lost_term(own_store))
    assert len(seen) > 1 and seen[-1] == 3
