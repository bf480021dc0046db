"""Starts jobs for the fault tests and ends, by pid, what a failed one left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.faults import invariants
from tests.faults.job import Job
from tests.faults.training import Plan


class StartJob(Protocol):
    """Starts the launcher with `flags`, in the test's folder."""

    def __call__(self, plan: Plan, nproc: int, *flags: str, **more: Any) -> Job: ...


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[StartJob]:
    """A function that starts a job. After the test nothing may be left of any (I1), whatever the test looked at."""
    jobs: list[Job] = []

    def start(plan: Plan, nproc: int, *flags: str, **more: Any) -> Job:
        jobs.append(Job(tmp_path, plan, nproc, flags, **more))
        return jobs[-1]

    yield start
    try:
        for job in jobs:
            assert job.process.poll() is not None, f"the test ended before the launcher did\n{job.tail()}"
            invariants.nothing_left(job)
            invariants.decided_again(job.journal_folder)
    finally:
        for job in jobs:
            job.kill_all()
