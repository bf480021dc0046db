"""The Trainer's state in memory: ranks are killed, and the training goes on from there as if nothing had happened."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left
from tests.faults.job import Job
from tests.faults.training import Plan

WORKER = Path(__file__).with_name("transformers_memory.py")
STEPS = 18
"""Two epochs of 8 steps, and more."""
LIMIT_S = 170.0


@pytest.fixture(autouse=True)
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips where `transformers` is not installed, as it needs Python 3.11; else, where `CI` is set, that is a
    failure."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if not importlib.util.find_spec("transformers") and (sys.version_info < (3, 11) or not os.environ.get("CI")):
        pytest.skip("transformers is not installed")


def write_plan(folder: Path, **plan: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "training.json").write_text(json.dumps({"kills": {}, "disk": 0, "steps": STEPS, **plan}))


def end_of(folder: Path, rank: int) -> Any:
    """What a rank had at its end."""
    return json.loads((folder / f"end-{rank}.json").read_text())


def firsts(folder: Path) -> list[int]:
    """For each cycle the step before the first batch of rank 0."""
    first: dict[int, int] = {}
    for line in (folder / "seen").read_text().splitlines():
        cycle, rank, step = map(int, line.split())
        if rank == 0:
            first.setdefault(cycle, step)
    return [first[cycle] for cycle in sorted(first)]


def run(start_job: StartJob, *flags: str) -> Job:
    """A job of two ranks to its end."""
    job = start_job(Plan(), 2, "--max-restarts=3", "--ft-preload=transformers", *flags, script=WORKER)
    assert job.finish(LIMIT_S) == 0, job.tail()
    nothing_left(job)
    return job


@pytest.mark.timeout(400)
def test_the_training_goes_on_as_without_a_fault(start_job: StartJob, tmp_path: Path) -> None:
    """One rank is killed, then all ranks in the next epoch, then one after a checkpoint on disk that is newer."""
    write_plan(tmp_path)
    run(start_job, "--ft-memory-interval=none")
    undisturbed = [end_of(tmp_path, rank) for rank in (0, 1)]
    (tmp_path / "seen").unlink()
    kills = {
        "0": {"step": 5, "ranks": [1]},
        "1": {"step": 11, "ranks": [0, 1]},
        "2": {"step": 15, "ranks": [0]},
    }
    write_plan(tmp_path, kills=kills, disk=14)
    job = run(start_job, "--ft-memory-interval=4")
    assert firsts(tmp_path) == [0, 4, 8, 14], job.tail()
    goes_on = re.findall(r"the training goes on from (.*)", job.output)
    assert goes_on == [
        "step 4 in memory; 1 step is lost",
        "step 8 in memory; 3 steps are lost",
        "its checkpoint on disk, step 14; 1 step is lost",
    ], job.tail()
    assert [end_of(tmp_path, rank) for rank in (0, 1)] == undisturbed


def test_without_the_launcher_nothing_is_kept(tmp_path: Path) -> None:
    write_plan(tmp_path, steps=3)
    done = subprocess.run([sys.executable, str(WORKER), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert end_of(tmp_path, 0)["step"] == 3
    assert "ft_client" not in done.stderr


def test_the_newest_complete_checkpoint_on_disk_counts(tmp_path: Path) -> None:
    from ft_client.integrations.transformers import step_on_disk as step_of

    assert step_of(tmp_path) == step_of(tmp_path / "none") == 0
    for step in (9, 10, 11):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    assert step_of(tmp_path) == 10
    assert step_of(tmp_path / "checkpoint-9") == 9
    assert step_of(tmp_path / "checkpoint-11") == 0
