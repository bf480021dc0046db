"""When it is time to save: by rank 0's clock, alike on all ranks, and with few looks at it."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from ft_client.errors import RankMonitorClientError
from ft_client.rank.agreement import group
from ft_client.rank.saving import SaveSchedule, interval_of
from ft_client.rank_monitor_client import RankMonitorClient
from rank_monitor.contract import env

SIZE = 2


@pytest.mark.parametrize(
    ("setting", "chosen", "interval_s"),
    [
        (None, "900", None),
        (60.0, "900", 60.0),
        ("auto", "900.5", 900.5),
        ("auto", None, None),
        ("auto", "", None),
    ],
)
def test_which_interval_applies(setting: float | str | None, chosen: str | None, interval_s: float | None) -> None:
    environ = {} if chosen is None else {env.SAVE_INTERVAL: chosen}
    assert interval_of(setting, environ) == interval_s


def saves(step_s: list[float], interval_s: float, save_s: float = 0.0) -> tuple[list[float], int]:
    """Returns the seconds of training before each save, and how often rank 0 was asked."""
    asked = []
    real = group.from_rank0
    group.from_rank0 = lambda value: asked.append(value) or real(value)  # type: ignore[func-returns-value]
    try:
        schedule, now, trained, found = SaveSchedule(), 0.0, 0.0, []
        for took_s in step_s:
            now += took_s
            trained += took_s
            if schedule.is_due(interval_s, now):
                found.append(trained)
                now += save_s
                trained = 0.0
    finally:
        group.from_rank0 = real
    return found, len(asked)


@pytest.mark.parametrize(
    ("step_s", "interval_s"), [([1.0] * 1000, 100), ([0.01] * 100_000, 300), ([90.0] * 20, 60), ([1.0] * 50, 1.2)]
)
def test_saves_are_an_interval_apart_to_a_step(step_s: list[float], interval_s: float) -> None:
    found, asked = saves(step_s, interval_s, save_s=1000.0)
    assert found
    # The interval counts from the first call after a save: the step before it is beyond it.
    for trained in found:
        assert abs(trained - step_s[0] - max(interval_s, step_s[0])) <= 0.51 * step_s[0]
    assert asked <= len(step_s) / 64 + 10 * (len(found) + 1)


def test_steps_that_become_slower_do_not_put_a_save_off_for_long() -> None:
    found, _ = saves([0.1] * 100 + [5.0] * 500, 600)
    assert found[0] <= 600 + 65 * 5.0


def test_the_time_of_a_save_does_not_count() -> None:
    assert saves([1.0] * 300, 50, save_s=0.0)[0] == saves([1.0] * 300, 50, save_s=500.0)[0]


def _rank(rank: int, folder: str) -> list[list[int]]:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(SIZE))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    found: list[list[int]] = []
    # The same interval everywhere; none on the others, as after a monitor that did not answer; and none on rank 0.
    for interval_s in (30.0, None if rank else 30.0, 30.0 if rank else None):
        schedule = SaveSchedule()
        # Each rank has a clock of its own, with another origin and another speed.
        due = [step for step in range(400) if schedule.is_due(interval_s, 1000.0 * rank + step * (1.0 + rank))]
        found.append(due)
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_all_ranks_save_after_the_same_steps(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(SIZE, get_context("spawn")) as pool:
        results: list[Any] = list(pool.map(_rank, range(SIZE), [folder] * SIZE))
    assert results[0] == results[1]
    assert [len(due) for due in results[0]] == [400 // 31, 400 // 31, 0]


def test_without_an_interval_it_is_never_time() -> None:
    client = RankMonitorClient()
    with pytest.raises(RankMonitorClientError):
        client.should_save()
    client.init_workload_monitoring()
    try:
        assert not client.should_save()
        with pytest.raises(RankMonitorClientError, match="not above zero"):
            client.should_save(0)
        with pytest.raises(RankMonitorClientError, match="not above zero"):
            client.should_save(float("nan"))
        assert not any(client.should_save(3600.0) for _ in range(100))
    finally:
        client.shutdown_workload_monitoring()


def test_a_call_of_the_function_begins_anew() -> None:
    """Ranks that restart in process were interrupted after different steps: none may go on counting."""
    client = RankMonitorClient()
    client.init_workload_monitoring()
    try:
        for _ in range(40):
            client.should_save(3600.0)
        asked: list[float] = []
        real, group.from_rank0 = group.from_rank0, lambda value: asked.append(value) or value  # type: ignore[func-returns-value]
        try:
            RankMonitorClient.call_began(0)
            client.should_save(3600.0)
        finally:
            group.from_rank0 = real
        assert asked == [1]
    finally:
        client.shutdown_workload_monitoring()
