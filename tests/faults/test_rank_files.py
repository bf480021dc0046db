"""Files that a rank can name or write, made hostile: the fault is decided, the restart comes, SIGTERM ends the job."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rank_monitor.contract.exit_codes import ExitCode
from tests.faults.conftest import StartJob
from tests.faults.hostile import HOSTILE_FILES, ITERATION_FILE
from tests.faults.invariants import modes, nothing_left
from tests.faults.job import Place
from tests.faults.training import Plan, PlannedFault

NPROC = len(HOSTILE_FILES)
HOLD = 8


@pytest.mark.parametrize("log_dir", ["no log folder", "a log folder"])
def test_a_restart_and_sigterm(start_job: StartJob, tmp_path: Path, log_dir: str) -> None:
    """Each rank another kind, at once: in the cycle that fails, and again in the one that is told to end."""
    faults = (PlannedFault("hostile files and exit", iteration=4), PlannedFault("hostile files", iteration=6))
    flags = ("--max-restarts=1", f"--ft-checkpoint-iteration-file={tmp_path / ITERATION_FILE}")
    flags += ("--log-dir=logs", "--tee=3", "--ft-log-group-access") if log_dir == "a log folder" else ()
    job = start_job(Plan(faults, saves_on_sigterm=True, hold=HOLD), NPROC, *flags)
    job.until_ranks_train(HOLD, cycle=1)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == ExitCode.PREEMPTED, job.tail()
    nothing_left(job)
    group = log_dir == "a log folder"
    assert modes(job.journal_folder, tmp_path / "logs") == ({0o640, 0o750} if group else {0o600, 0o700})
    (fault,), decisions = job.journal("fault"), job.journal("decision")
    assert fault["kind"] == "exit" and fault["exit_code"] == 3, job.tail()
    assert [decision["action"] for decision in decisions] == ["restart"], job.tail()


def test_the_last_restart_is_spent(start_job: StartJob, tmp_path: Path) -> None:
    """The job ends as failed jobs do, with the ranks' exit code and the summary."""
    place = Place(environ={"TORCHELASTIC_ERROR_FILE": str(tmp_path / "reply.json")})
    faults = (PlannedFault("hostile files and exit", iteration=4),)
    job = start_job(Plan(faults), NPROC, "--max-restarts=0", place=place)
    assert job.finish() == 3, job.tail()
    nothing_left(job)
    assert "Root Cause" in job.output and "error of the launcher" not in job.output, job.tail()
