"""Real jobs that end before their training does, and go on from shared storage in a second start."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left
from tests.faults.job import Job
from tests.faults.test_memory_checkpoint import FLAGS, WORKER, ends, write_plan
from tests.faults.training import Plan

UNTIL = "which an earlier start wrote to --ft-memory-flush"


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    (tmp_path / "storage").mkdir()
    return tmp_path / "storage"


def start(start_job: StartJob, storage: Path, name: str, *flags: str) -> Job:
    return start_job(Plan(), 2, f"--ft-memory-flush={storage}", *FLAGS, *flags, script=WORKER, name=name)


def test_a_preempted_job_goes_on_from_the_storage(start_job: StartJob, tmp_path: Path, storage: Path) -> None:
    write_plan(tmp_path, [(0, 22, [0, 1], "waits_for_the_end")])
    first = start(start_job, storage, "first")
    first.until(lambda: len(list(tmp_path.glob("waits-*"))) == 2, "the last save")
    first.process.send_signal(signal.SIGTERM)
    assert first.finish(120) in (86, 87), first.tail()
    (written,) = first.journal("memory_flushed")
    assert (written["step"], written["reason"]) == (20, ""), first.tail()
    nothing_left(first)
    write_plan(tmp_path)
    second = start(start_job, storage, "second")
    ends(second, 2, start=20)
    (found,) = second.journal("memory_brought_back")
    assert found["step"] == 20
    assert [event["tier"] for event in second.journal("memory_loaded")] == ["flush"]
    assert f"the training goes on from step 20, {UNTIL}" in second.output
    assert not list(storage.iterdir())
    nothing_left(second)


def test_a_job_that_gives_up_leaves_its_state_but_not_one_that_it_failed_from(
    start_job: StartJob, tmp_path: Path, storage: Path
) -> None:
    """The first start fails once: its state may be good. The second goes on from it, and fails in the same way. The
    third goes on from the one before, and saves a newer one until it fails."""
    write_plan(tmp_path, [(-1, 22, [1], "raises")])
    for name, step, began in (("first", 20, 0), ("second", 15, 20), ("third", 20, 15)):
        job = start(start_job, storage, name)
        assert job.finish(120) == 1, job.tail()
        assert [event["step"] for event in job.journal("memory_loaded")] == [began], job.tail()
        assert [event["step"] for event in job.journal("memory_flushed")] == [step], job.tail()
        nothing_left(job)


def test_a_job_that_has_only_the_state_that_it_failed_from_says_so(
    start_job: StartJob, tmp_path: Path, storage: Path
) -> None:
    write_plan(tmp_path, [(0, 7, [1], "raises")])
    for name, step in (("first", 5), ("second", None)):
        job = start(start_job, storage, name)
        assert job.finish(120) == 1, job.tail()
        assert [event["step"] for event in job.journal("memory_flushed")] == [step], job.tail()
    assert "to --ft-memory-flush: the states of step 5 and later ones may be bad" in job.output


def test_a_job_that_gives_up_after_newer_saves_leaves_the_newest(
    start_job: StartJob, tmp_path: Path, storage: Path
) -> None:
    """The state that the last start began from has proved good: it saved newer ones before it failed."""
    for name, fails_at, began, step in (("first", 22, 0, 20), ("second", 32, 20, 30), ("third", 37, 30, 35)):
        write_plan(tmp_path, [(0, fails_at, [1], "raises")])
        job = start(start_job, storage, name)
        assert job.finish(120) == 1, job.tail()
        assert [event["step"] for event in job.journal("memory_loaded")] == [began], job.tail()
        assert [event["step"] for event in job.journal("memory_flushed")] == [step], job.tail()
        (end,) = job.journal("cycle_end")
        assert (end["loaded_step"], end["saved_step"]) == (began, step)
        nothing_left(job)


def test_two_jobs_share_a_storage(start_job: StartJob, tmp_path: Path, storage: Path) -> None:
    """Neither goes on from the state of the other one."""
    write_plan(tmp_path, [(0, 22, [1], "raises")])
    first = start(start_job, storage, "first", "--rdzv-id=one")
    assert first.finish(120) == 1, first.tail()
    write_plan(tmp_path, [])
    other = start(start_job, storage, "other", "--rdzv-id=other")
    ends(other, 2, start=0)
    again = start(start_job, storage, "again", "--rdzv-id=one")
    ends(again, 2, start=20)
