"""Real jobs whose state lies in memory: whatever happens to their ranks, they end with the weights of a job without
faults, and lose no more steps than since the last save."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Job, Place
from tests.faults.memory_worker import PLAN_FILE
from tests.faults.training import Plan

WORKER = Path(__file__).with_name("memory_worker.py")
STEPS = 40
EVERY = 5
"""Steps between two saves."""
IMPORTS = "--ft-preload=torch._dynamo,torch.distributed.fsdp,torch.distributed.tensor.parallel"


@pytest.fixture
def folder() -> Iterator[Path]:
    """The node's folder for the job."""
    path = Path("/dev/shm") / f"ft_memory_test_{uuid.uuid4().hex}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


def write_plan(out: Path, folder: Path, faults: list[tuple[int, int, list[int], str]] = (), **more: Any) -> None:
    told = {"folder": str(folder), "keep": 2, "limit": 1 << 30, "interval": EVERY, **more.pop("told", {})}
    plan = {"kind": "ddp", "width": 32, "steps": STEPS, "told": told, "faults": list(faults), **more}
    (out / PLAN_FILE).write_text(json.dumps(plan))


def ends(job: Job, nproc: int, start: int, limit_s: float = 120.0) -> None:
    """The job ends well, its last ranks went on from a step, and have the weights of a job without faults."""
    assert job.finish(limit_s) == 0, job.tail()
    for rank in range(nproc):
        found = json.loads((job.folder / f"end-{rank}").read_text())
        assert found == {"start": start, "same": True}, job.tail()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "nproc"),
    [("ddp", 2), ("fsdp", 2), pytest.param("hsdp", 4, marks=SLOW), pytest.param("tp", 2, marks=SLOW)],
)
def test_one_rank_and_then_all_are_killed(
    start_job: StartJob, tmp_path: Path, folder: Path, kind: str, nproc: int
) -> None:
    faults = [(0, 13, [1], "dies_at_once"), (1, 27, list(range(nproc)), "dies_at_once")]
    write_plan(tmp_path, folder, faults, kind=kind)
    job = start_job(Plan(), nproc, "--max-restarts=2", IMPORTS, script=WORKER)
    ends(job, nproc, start=25)
    assert "the training goes on from step 10 in memory" in job.output


@pytest.mark.parametrize("what", ["dies_while_it_copies", "dies_before_the_checksum", "dies_before_the_name"])
def test_a_rank_that_is_killed_while_it_saves_leaves_no_generation(
    start_job: StartJob, tmp_path: Path, folder: Path, what: str
) -> None:
    """The save of step 25 is cut off: the job goes on from step 20."""
    write_plan(tmp_path, folder, [(0, 22, [1], what)], kind="fsdp")
    job = start_job(Plan(), 2, "--max-restarts=1", IMPORTS, script=WORKER)
    ends(job, 2, start=20)


def test_a_flipped_byte_costs_one_generation(start_job: StartJob, tmp_path: Path, folder: Path) -> None:
    write_plan(tmp_path, folder, [(0, 22, [1], "flips_a_byte_and_dies")], kind="fsdp")
    job = start_job(Plan(), 2, "--max-restarts=1", IMPORTS, script=WORKER)
    ends(job, 2, start=15)
    assert "step 20 in memory is not used: step-20_rank-1-of-2" in job.output
    assert "the checksum of its content is wrong" in job.output
    assert "step 20 in memory is not used: another rank cannot read its file" in job.output


def test_a_second_job_goes_on_from_the_folder_of_the_first(start_job: StartJob, tmp_path: Path, folder: Path) -> None:
    write_plan(tmp_path, folder, [(0, 33, [0, 1], "dies_at_once")])
    first = start_job(Plan(), 2, "--max-restarts=0", IMPORTS, script=WORKER)
    assert first.finish(120) != 0
    write_plan(tmp_path, folder)
    ends(start_job(Plan(), 2, "--max-restarts=0", IMPORTS, script=WORKER, name="second"), 2, start=30)


def test_state_in_replicas_lies_in_memory_once_per_node(start_job: StartJob, tmp_path: Path, folder: Path) -> None:
    write_plan(tmp_path, folder, width=256)
    ends(start_job(Plan(), 2, IMPORTS, script=WORKER), 2, start=0)
    sizes = {rank: [file.stat().st_size for file in folder.glob(f"step-*_rank-{rank}-*")] for rank in (0, 1)}
    assert len(sizes[0]) == len(sizes[1]) == 3
    assert min(sizes[0]) > 3 * 2 * 256 * 256 * 4
    assert max(sizes[1]) < 100_000


def test_a_restart_in_process_in_the_middle_of_a_save(start_job: StartJob, tmp_path: Path, folder: Path) -> None:
    faults = [(0, 22, [0], "waits_while_it_copies"), (0, 25, [1], "fails")]
    write_plan(tmp_path, folder, faults, in_process=True)
    job = start_job(Plan(), 2, "--max-restarts=0", IMPORTS, script=WORKER)
    ends(job, 2, start=20)


OWN_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"', "-")


def in_small_shm(command: list[str], **more: Any) -> subprocess.Popen[bytes]:
    """Starts a program with a /dev/shm of 4 MiB of its own."""
    return subprocess.Popen([*OWN_SHM, *command], **more)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_a_memory_that_is_too_small_is_said_and_the_training_goes_on(
    start_job: StartJob, tmp_path: Path, folder: Path
) -> None:
    write_plan(tmp_path, folder, width=400)
    job = start_job(Plan(), 2, IMPORTS, script=WORKER, place=Place(start=in_small_shm))
    ends(job, 2, start=0)
    assert job.output.count("no state is kept in memory: 3 files of 3.7 MiB do not fit") == 1, job.tail()
