"""The cleanup of a healthy rank that is interrupted runs to its end, whatever form it has; no lock stays locked."""

from __future__ import annotations

import pytest

from tests.client.inprocess import cleanup_mains
from tests.client.inprocess.cleanup_mains import FORMS
from tests.client.inprocess.job import job

_LIMIT_S = 1800.0


@pytest.mark.parametrize("collective", [False, True], ids=["at work", "in a collective"])
def test_a_cleanup_runs_to_its_end(collective: bool) -> None:
    """In a collective it begins with the error that the abort caused, before the interruption."""
    with job(1 + len(FORMS), cleanup_mains.cleans_up, collective=collective) as made:
        told = made.end()
    assert [one.result for one in told.values()] == [1] * len(told), told
    alive = {form: told[number].notes for number, form in enumerate(FORMS, 1)}
    assert alive == {form: [("alive", [])] for form in FORMS}


@pytest.mark.timeout(_LIMIT_S)
@pytest.mark.parametrize("restarts", [200, pytest.param(10000, marks=pytest.mark.slow)])
def test_a_loop_full_of_locks_goes_on_after_each_restart(restarts: int) -> None:
    with job(2, cleanup_mains.lock_heavy, restarts=restarts) as made:
        told = made.end(_LIMIT_S)
    assert [one.result for one in told.values()] == [restarts] * 2, told
    hangs = [note for one in told.values() for note in one.notes if "no progress" in note or "no ping" in note]
    assert not hangs
