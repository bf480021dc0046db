"""Ranks die around `init_process_group`, above all the first one: the others restart in process, and none is lost."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.client.inprocess import first_rank
from tests.client.inprocess.job import job
from tests.faults.conftest import StartJob
from tests.faults.first_rank_worker import FAULT
from tests.faults.invariants import nothing_left
from tests.faults.training import Plan

SCRIPT = Path(__file__).with_name("first_rank_worker.py")
TIMES = 50


def drawn(number: int) -> tuple[int, dict[str, Any]]:
    """The size of a job, and who dies where in it."""
    source = random.Random(number)
    size = source.randint(2, 8)
    victim = number % 4 % size
    iteration = number // 4 % 2
    if iteration:
        victim = min(victim, size - 2)  # the last one raised in the iteration before
    place = first_rank.PLACES[number % len(first_rank.PLACES)]
    return size, {"victim": victim, "place": place, "iteration": iteration, "delay_s": source.uniform(0, 0.03)}


def results_of_others(size: int, victim: int, iteration: int) -> dict[int, tuple[int, int]]:
    """What the ranks come to without one of them."""
    return {rank: (sum(range(size - 1)), iteration + 1) for rank in range(size) if rank != victim}


def dies_under_the_launcher(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch, size: int, fault: dict[str, Any]
) -> None:
    monkeypatch.setenv(FAULT, json.dumps(fault))
    job = start_job(Plan(), size, "--max-restarts=0", "--ft-rejoin=false", script=SCRIPT)
    (job.folder / "results").mkdir(exist_ok=True)
    assert job.finish() == 0, job.tail()
    nothing_left(job)
    assert not job.journal("fault", "interruption", "verdict", "late_rank_ended"), job.tail()
    (lost,) = job.journal("in_process_fault")
    assert (lost["rank"], lost["exit_code"]) == (fault["victim"], -9)
    found = {int(file.name): json.loads(file.read_text()) for file in (job.folder / "results").iterdir()}
    for file in (job.folder / "results").iterdir():
        file.unlink()
    assert {rank: tuple(result) for rank, result in found.items()} == results_of_others(
        size, fault["victim"], fault["iteration"]
    )


def dies_alone(size: int, fault: dict[str, Any], hosted: bool = False) -> None:
    limit_s = first_rank.TIMEOUTS["soft_timeout"]
    with job(size, first_rank.main, hosted=hosted, **fault) as made:
        told = made.end(limit_s)
    assert told[fault["victim"]].exit_code == -9
    others = results_of_others(size, fault["victim"], fault["iteration"])
    assert {rank: told[rank].result for rank in others} == others


@pytest.mark.parametrize(("size", "place", "iteration"), [(2, "in", 0), (4, "before", 1)])
def test_the_first_rank_dies_under_the_launcher(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch, size: int, place: str, iteration: int
) -> None:
    dies_under_the_launcher(start_job, monkeypatch, size, {"victim": 0, "place": place, "iteration": iteration})


@pytest.mark.parametrize(("size", "place", "iteration", "hosted"), [(3, "before", 1, False), (3, "in", 0, True)])
def test_the_first_rank_dies_alone(size: int, place: str, iteration: int, hosted: bool) -> None:
    """`hosted`: the store of the coordination is served elsewhere, as by torchrun."""
    dies_alone(size, {"victim": 0, "place": place, "iteration": iteration}, hosted)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(TIMES))
def test_any_rank_dies_under_the_launcher(start_job: StartJob, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    dies_under_the_launcher(start_job, monkeypatch, *drawn(number))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(TIMES))
def test_any_rank_dies_alone(number: int) -> None:
    dies_alone(*drawn(number))
