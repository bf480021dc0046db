"""Real jobs with local checkpoints by the names of NVIDIA's package: whatever happens to the ranks, the job ends with
the weights of a job without faults, and no step is computed from a part that is torn or of another save."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Job
from tests.faults.training import Plan

WORKER = Path(__file__).with_name("local_checkpoint_worker.py")


def write_plan(out: Path, faults: Sequence[tuple[int, int, list[int], str]] = (), is_async: bool = False) -> None:
    """Writes what the ranks shall do. `faults`: cycle, step, ranks, and what happens to them."""
    (out / "local.json").write_text(json.dumps({"steps": 40, "faults": list(faults), "is_async": is_async}))


def begin(start_job: StartJob, *flags: str, name: str = "node") -> Job:
    return start_job(Plan(), 2, "--ft-alias-nvrx", *flags, script=WORKER, name=name)


def ends(job: Job, start: int) -> None:
    """The job ends well; its last ranks went on from a step, and have the weights of a job without faults. Nothing of
    its parts is left."""
    assert job.finish(120) == 0, job.tail()
    for rank in range(2):
        found = json.loads((job.folder / f"end-{rank}").read_text())
        assert (found["start"], found["same"]) == (start, True), job.tail()
        assert found["folder"].startswith("/dev/shm/ft_memory_") and not Path(found["folder"]).exists()
    assert not (job.folder / "local").exists()


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "asynchronous"])
def test_one_rank_and_then_all_are_killed(start_job: StartJob, tmp_path: Path, is_async: bool) -> None:
    write_plan(tmp_path, [(0, 13, [1], "dies"), (1, 28, [0, 1], "dies")], is_async)
    job = begin(start_job, "--max-restarts=2")
    ends(job, start=25)
    looks = [(look["tier"], look["step"], look["reached"]) for look in job.journal("memory_loaded")]
    assert looks == [("none", 0, 0), ("memory", 10, 0), ("memory", 25, 0)], "nobody knows a later step"
    assert "the training goes on from step 25 in memory" in job.output
    saved = [(cycle["newest"], cycle["saves"], cycle["failed"]) for cycle in job.journal("memory_saved")]
    assert saved == [(10, 2, 0), (25, 3, 0), (40, 3, 0)]


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "asynchronous"])
def test_a_rank_that_is_killed_while_it_writes_leaves_no_part(
    start_job: StartJob, tmp_path: Path, is_async: bool
) -> None:
    """The save of step 25 is cut off. Where another process writes, only that process dies, and the training goes on
    with one line."""
    faults = [(0, 22, [1], "dies_while_it_writes")]
    if is_async:
        faults.append((0, 28, [0], "dies"))
    write_plan(tmp_path, faults, is_async)
    job = begin(start_job, "--max-restarts=1")
    ends(job, start=20)
    said = "no local checkpoint was saved: iteration 25: rank 1: its part is not there"
    assert (said in job.output) == is_async, job.tail()


def test_a_flipped_byte_costs_the_checkpoint_and_not_the_job(start_job: StartJob, tmp_path: Path) -> None:
    write_plan(tmp_path, [(0, 22, [1], "flips_a_byte_and_dies")])
    job = begin(start_job, "--max-restarts=1")
    ends(job, start=0)
    assert "the local checkpoint of iteration 20 is not used: rank 1" in job.output


def test_a_launcher_that_was_killed_is_started_again(start_job: StartJob, tmp_path: Path) -> None:
    write_plan(tmp_path, [(0, 33, [0], "kills_the_launcher")])
    first = begin(start_job)
    assert first.finish(120) == 128 + signal.SIGKILL
    write_plan(tmp_path)
    second = begin(start_job, name="second")
    ends(second, start=30)
    assert "takes over the state in memory of an earlier start: step 30" in second.output
