"""Processes that ignore SIGTERM: `--workers-stop-timeout` is kept, then they are killed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import Told, holds
from tests.faults.job import Job
from tests.faults.training import Plan, PlannedFault

LIMIT_S = 1.0


def moment(job: Job, event: str) -> float:
    (line,) = [line for line in job.journal(event) if line["cycle"] == 0]
    return float(line["t"])


def killed(job: Job) -> list[Any]:
    return [pid for line in job.journal("killed") for pid in line["pids"]]


def test_a_rank_that_ignores_sigterm(start_job: StartJob) -> None:
    plan = Plan((PlannedFault("exit 3", rank=1),), stubborn_ranks=(0,))
    job = start_job(plan, 2, "--max-restarts=1", f"--workers-stop-timeout={LIMIT_S}")
    holds(job, 0, [Told("exit", {1})])
    assert len((job.folder / "sigterm-0").read_text().splitlines()) == 1
    assert killed(job) == [job.ranks(0)[0]]
    assert moment(job, "killed") - moment(job, "rank_exit") >= LIMIT_S


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_child_of_a_rank_that_ignores_sigterm(start_job: StartJob, nproc: int) -> None:
    plan = Plan((PlannedFault("exit 3", rank=0),), children=("stubborn",))
    job = start_job(plan, nproc, "--max-restarts=1", f"--workers-stop-timeout={LIMIT_S}")
    holds(job, 0, [Told("exit", {0})])
    assert sorted(killed(job)) == sorted(child.pid for child in job.children())
    assert moment(job, "killed") - moment(job, "rank_exit") >= LIMIT_S
