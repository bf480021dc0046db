"""Ranks that die or hang without a launcher: their agents speak for them, their monitors interrupt and kill."""

from __future__ import annotations

from typing import Any

import pytest

from tests.client.inprocess import corner_mains, mains
from tests.client.inprocess.job import job, seconds

SHORT = {
    "monitor_process_interval": seconds(0.2),
    "monitor_thread_interval": seconds(0.2),
    "progress_watchdog_interval": seconds(0.2),
    "soft_timeout": seconds(1.5),
    "hard_timeout": seconds(3),
    "termination_grace_time": seconds(0.5),
}


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGTERM", "SIGSEGV"])
@pytest.mark.parametrize("on", [0, 1])
def test_the_others_go_on_without_a_rank_that_died(fault: str, on: int) -> None:
    with job(3, mains.main, hosted=False, fault=fault, on=(on,)) as made:
        told = made.end()
    assert told[on].exit_code not in (0, 1)
    left = [one.result for rank, one in sorted(told.items()) if rank != on]
    assert left == [(0, 2, 1), (1, 2, 1)]


def test_two_that_die_at_once() -> None:
    with job(4, mains.main, hosted=False, fault="SIGKILL", on=(0, 2)) as made:
        told = made.end()
    assert {told[rank].result[:2] for rank in (1, 3)} == {(0, 2), (1, 2)}


@pytest.mark.parametrize("fault", ["hang", "livelock"])
def test_a_hang_is_interrupted(fault: str) -> None:
    with job(2, mains.main, hosted=False, fault=fault, options={**SHORT, "hard_timeout": seconds(30)}) as made:
        told = made.end()
    assert [told[rank].result for rank in range(2)] == [(0, 2, 1), (1, 2, 1)]


@pytest.mark.parametrize("fault", ["gil", "hang in atomic"])
def test_a_hang_that_cannot_be_interrupted_is_killed(fault: str) -> None:
    with job(3, mains.main, hosted=False, fault=fault, options=SHORT) as made:
        told = made.end()
    assert told[1].exit_code is not None and told[1].exit_code < 0
    assert [told[rank].result for rank in (0, 2)] == [(0, 2, 1), (1, 2, 1)]


def test_a_collective_that_never_completes() -> None:
    with job(2, mains.in_group, hosted=False, iterations=2, hang=True) as made:
        told = made.end()
    assert [one.result for one in told.values()] == [(1, 2), (1, 2)]


def test_a_spare_takes_the_place_of_the_dead() -> None:
    options: dict[str, Any] = {"fault": "SIGKILL", "on": (0,), "active": 2}
    with job(3, mains.main, hosted=False, **options) as made:
        told = made.end()
    assert [told[rank].result for rank in (1, 2)] == [(0, 2, 1), (1, 2, 1)]


@pytest.mark.parametrize(("tree", "at"), [(True, 0), (False, 0), (False, 1)])
def test_one_that_dies_while_ranks_are_assigned_holds_up_nobody(tree: bool, at: int) -> None:
    with job(3, corner_mains.killed_while_assigning, hosted=False, tree=tree, at=at) as made:
        told = made.end()
    assert told[1].exit_code == -9
    assert [told[rank].result for rank in (0, 2)] == [(0, 2, at + 1), (1, 2, at + 1)]


@pytest.mark.parametrize("where", ["function", "initialize", "abort", "finalize", "terminate"])
def test_one_that_dies_in_a_restart_holds_up_nobody(where: str) -> None:
    """At each barrier the others come to: of the start, of the end, and when they have returned."""
    with job(3, corner_mains.killed_in, hosted=False, where=where) as made:
        told = made.end()
    assert told[1].exit_code == -9
    last = 2 if where == "initialize" else 1
    assert [told[rank].result for rank in (0, 2)] == [(0, 2, last), (1, 2, last)]


def test_one_that_dies_when_all_is_done_is_not_missed() -> None:
    with job(3, corner_mains.killed_in, hosted=False, where="completion") as made:
        told = made.end()
    assert told[1].exit_code == -9
    assert [told[rank].result for rank in (0, 2)] == [(0, 3, 1), (2, 3, 1)]
