"""Lightning's state in memory: ranks are killed, and the training goes on from there as if nothing had happened."""

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
import torch

from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left
from tests.faults.job import Job
from tests.faults.training import Plan

WORKER = Path(__file__).with_name("lightning_memory.py")
STEPS = 22
"""Two epochs of 8 steps, and more."""
LIMIT_S = 150.0
EACH_STEP = "--ft-memory-interval=1"
NEEDS_FSDP = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="FSDP2 of this torch needs a GPU: its streams on a CPU lack events",
)


@pytest.fixture(autouse=True)
def lightning() -> None:
    """Skips where Lightning is not installed; where `CI` is set, that is a failure."""
    if not importlib.util.find_spec("lightning") and not os.environ.get("CI"):
        pytest.skip("Lightning is not installed")


def write_plan(folder: Path, **plan: Any) -> None:
    folder.mkdir(exist_ok=True)
    usual = {"strategy": "ddp", "kills": {}, "disk": 0, "steps": STEPS, "async": False, "watch": False}
    plan = {**usual, "fits": 1, "raises": None, **plan}
    (folder / "training.json").write_text(json.dumps(plan))


def train(start_job: StartJob, folder: Path, *flags: str, name: str = "job", **plan: Any) -> Job:
    """A job of two ranks to its end."""
    write_plan(folder, **plan)
    job = start_job(Plan(), 2, "--max-restarts=4", "--ft-preload=lightning.pytorch", *flags, script=WORKER, name=name)
    assert job.finish(LIMIT_S) == 0, job.tail()
    nothing_left(job)
    return job


def ends(folder: Path) -> list[Any]:
    """What both ranks had at their end."""
    return [json.loads((folder / f"end-{rank}.json").read_text()) for rank in (0, 1)]


def firsts(folder: Path, rank: int = 0) -> list[int]:
    """For each cycle the step before the first batch of a rank."""
    first: dict[int, int] = {}
    for line in (folder / "seen").read_text().splitlines():
        cycle, of, step = map(int, line.split())
        if of == rank:
            first.setdefault(cycle, step)
    return [first[cycle] for cycle in sorted(first)]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("sharded", marks=NEEDS_FSDP)])
def test_the_training_goes_on_as_without_a_fault(start_job: StartJob, tmp_path: Path, strategy: str) -> None:
    """One rank is killed in the middle of an epoch, all after its last step, and one in the first step of the next."""
    undisturbed = tmp_path / "undisturbed"
    kills = {
        "0": {"step": 5, "ranks": [1]},
        "1": {"step": 8, "ranks": [0, 1]},
        "2": {"step": 16, "ranks": [0]},
        "3": {"step": 20, "ranks": [0, 1]},
    }
    job = train(start_job, tmp_path, EACH_STEP, strategy=strategy, kills=kills)
    assert firsts(tmp_path) == [0, 5, 8, 16, 20], job.tail()
    goes_on = re.findall(r"the training goes on from step (\d+) in memory", job.output)
    assert goes_on == ["5", "8", "16", "20"], job.tail()
    write_plan(undisturbed, strategy=strategy)
    other = start_job(Plan(), 2, "--ft-memory-interval=none", script=in_folder(undisturbed), name="undisturbed")
    assert other.finish(LIMIT_S) == 0, other.tail()
    assert ends(tmp_path) == ends(undisturbed)


def in_folder(folder: Path) -> Path:
    """The worker as a script whose folder is another one than that of the test."""
    script = folder / "worker.py"
    script.write_text(f"import runpy, sys\nsys.argv = [sys.argv[0], {str(folder)!r}]\n")
    with script.open("a") as text:
        text.write(f"runpy.run_path({str(WORKER)!r}, run_name='__main__')\n")
    return script


def test_steps_between_two_saves_are_lost_and_told(start_job: StartJob, tmp_path: Path) -> None:
    kills = {"0": {"step": 7, "ranks": [0, 1]}}
    job = train(start_job, tmp_path, "--ft-memory-interval=5", kills=kills)
    assert firsts(tmp_path) == [0, 5], job.tail()
    assert "the training goes on from step 5 in memory; 2 steps are lost" in job.output, job.tail()


def test_a_newer_checkpoint_on_disk_is_used(start_job: StartJob, tmp_path: Path) -> None:
    """Saves in the background do no harm to those in memory, which are newer again after the next fault."""
    kills = {"0": {"step": 7, "ranks": [1]}, "1": {"step": 12, "ranks": [1]}}
    plan = {"kills": kills, "disk": 6, "async": True}
    job = train(start_job, tmp_path, "--ft-memory-interval=5", **plan)
    assert firsts(tmp_path)[1] == 6, job.tail()
    assert "the training goes on from its checkpoint on disk, step 6; 1 step is lost" in job.output, job.tail()
    assert firsts(tmp_path)[2] in (10, 12), job.tail()


def test_saves_in_memory_teach_no_limit_for_checkpoints(start_job: StartJob, tmp_path: Path) -> None:
    """One on disk takes longer: a rank that writes it would be ended as hung."""
    train(start_job, tmp_path, EACH_STEP, watch=True, kills={"0": {"step": 7, "ranks": [0, 1]}})
    limits = json.loads((tmp_path / "ft" / "_ft_state.json").read_text())["current_timeouts"]["section"]
    assert limits["calculated_sections"] == ["setup"], limits


def test_a_second_fit_takes_no_state_of_the_first_and_a_hook_that_fails_costs_one_save(
    start_job: StartJob, tmp_path: Path
) -> None:
    job = train(start_job, tmp_path, EACH_STEP, fits=2, steps=5, raises=[1, 3])
    seen = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    assert [int(step) for cycle, rank, step in seen if rank == "1"] == [*range(5), *range(5)], job.tail()
    assert "step 3 was not saved in memory: KeyError: 'the hook fails'" in job.output, job.tail()
    assert "a training of this name has ended in this process" in job.output, job.tail()


def test_without_the_launcher_nothing_is_kept(tmp_path: Path) -> None:
    write_plan(tmp_path, strategy="auto", steps=3)
    done = subprocess.run([sys.executable, str(WORKER), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "end-0.json").read_text())["step"] == 3
    assert "ft_client" not in done.stderr
