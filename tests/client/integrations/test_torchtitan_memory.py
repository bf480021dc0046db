"""torchtitan's state in memory: ranks are killed, and the training goes on from there as if nothing had happened."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left
from tests.faults.job import Job
from tests.faults.training import Plan

WORKER = Path(__file__).with_name("torchtitan_memory.py")
LIMIT_S = 150.0

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed: pip install torchtitan"
)


def train(start_job: StartJob, folder: Path, *flags: str, ranks: int = 2, name: str = "job", **plan: Any) -> Job:
    """A job to its end."""
    plan = {"kills": {}, "disk": 1000, "steps": 22, "memory_interval": None, "load_step": -1, **plan}
    (folder / "training.json").write_text(json.dumps(plan))
    job = start_job(Plan(), ranks, "--max-restarts=4", *flags, script=WORKER, name=name)
    assert job.finish(LIMIT_S) == 0, job.tail()
    nothing_left(job)
    return job


def ends(folder: Path) -> list[Any]:
    """What both ranks had at their end."""
    return [json.loads((folder / f"end-{rank}.json").read_text()) for rank in (0, 1)]


def test_the_training_goes_on_as_without_a_fault(start_job: StartJob, tmp_path: Path) -> None:
    """One rank is killed, then all, then one again, after a checkpoint on disk that is newer than that in memory."""
    job = train(start_job, tmp_path, "--ft-memory-interval=none")
    undisturbed = ends(tmp_path)
    for checkpoint in (tmp_path / "disk").iterdir():
        checkpoint.rename(tmp_path / f"undisturbed-{checkpoint.name}")
    kills = {
        "0": {"step": 5, "ranks": [1]},
        "1": {"step": 11, "ranks": [0, 1]},
        "2": {"step": 15, "ranks": [0]},
    }
    job = train(start_job, tmp_path, "--ft-memory-interval=4", kills=kills, disk=14)
    goes_on = re.findall(r"the training goes on from (.*)", job.output)
    assert goes_on == [
        "step 4 in memory; 1 step is lost",
        "step 8 in memory; 3 steps are lost",
        "its checkpoint on disk, step 14; 1 step is lost",
    ], job.tail()
    assert ends(tmp_path) == undisturbed


def test_the_interval_of_the_manager_and_a_step_that_is_named(start_job: StartJob, tmp_path: Path) -> None:
    one = {"0": {"step": 8, "ranks": [0]}}
    job = train(start_job, tmp_path, "--ft-memory-interval=50", ranks=1, steps=10, kills=one, disk=5, memory_interval=3)
    assert "step 6 in memory (the checkpoint on disk has step 5); 2 steps are lost" in job.output, job.tail()
    job = train(start_job, tmp_path, "--ft-memory-interval=1", ranks=1, name="named", steps=10, kills=one, load_step=5)
    assert "no state is kept in memory: torchtitan loads a step that was named" in job.output, job.tail()
    assert "in memory; " not in job.output, job.tail()
