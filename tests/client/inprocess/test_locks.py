"""An interruption leaves no lock of the standard library locked, wherever it strikes."""

from __future__ import annotations

import pytest

from tests.client.inprocess import lock_mains
from tests.client.inprocess.job import job

_LIMIT_S = 1800.0


@pytest.mark.timeout(_LIMIT_S)
@pytest.mark.parametrize("restarts", [200, pytest.param(10000, marks=pytest.mark.slow)])
def test_a_loop_full_of_locks_goes_on_after_each_restart(restarts: int) -> None:
    with job(2, lock_mains.lock_heavy, restarts=restarts) as made:
        told = made.end(_LIMIT_S)
    assert [one.result for one in told.values()] == [restarts] * 2, told
    hangs = [note for one in told.values() for note in one.notes if "no progress" in note or "no ping" in note]
    assert not hangs
