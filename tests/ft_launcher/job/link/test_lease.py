"""A lease runs out unless it is renewed, stays so, and is seen by whoever holds its timer."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ft_launcher.job.link.lease import Lease
from rank_monitor.contract.processes.wait import readable
from tests.patience import patient

LONG_S, SHORT_S = 3600.0, 0.05
PATIENCE_S = patient(20.0)


@pytest.fixture
def lease() -> Iterator[Lease]:
    lease = Lease(LONG_S)
    yield lease
    lease.close()
    assert lease.fileno() < 0


def ran_out(lease: Lease, limit_s: float = 0.0) -> bool:
    """Whether both say so: the lease, and its timer in another process' hands."""
    copy = os.dup(lease.fileno())
    try:
        seen = bool(readable([copy], limit_s))
        assert seen == (lease.silent_s() is not None)
        return seen
    finally:
        os.close(copy)


def test_it_runs_from_its_beginning_to_its_end(lease: Lease) -> None:
    assert not ran_out(lease), "no rank runs yet"
    lease.begin(lease.now())
    assert not ran_out(lease)
    lease.begin(lease.now() - LONG_S)
    assert ran_out(lease)
    lease.end()
    assert not ran_out(lease)


def test_it_runs_out_by_itself() -> None:
    lease = Lease(SHORT_S)
    lease.begin(lease.now())
    assert ran_out(lease, PATIENCE_S)
    silent_s = lease.silent_s()
    assert silent_s is not None and silent_s >= SHORT_S
    lease.close()


def test_a_beat_renews_it(lease: Lease) -> None:
    lease.begin(lease.now() - LONG_S + PATIENCE_S)
    lease.renew(lease.now())
    lease.renew(lease.now() - LONG_S)  # an older beat, answered late
    assert not ran_out(lease)


def test_one_that_has_run_out_is_not_renewed(lease: Lease) -> None:
    """Launcher and monitors may have stood still together: the first to wake must not hide it from the others."""
    lease.begin(lease.now() - LONG_S)
    lease.renew(lease.now())
    assert ran_out(lease)
    lease.begin(lease.now())
    assert not ran_out(lease), "a cycle that begins has one of its own"


def test_without_ranks_there_is_nothing_to_renew(lease: Lease) -> None:
    lease.renew(lease.now() - LONG_S)
    assert not ran_out(lease)
