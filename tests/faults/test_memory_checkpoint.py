"""Real jobs whose state lies in memory: whatever happens to their ranks, they end with the weights of a job without
faults, and lose no more steps than since the last save."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import own_shm
from tests.faults.conftest import StartJob
from tests.faults.job import Job, Place
from tests.faults.memory_worker import GO_FILE, PLAN_FILE
from tests.faults.training import Plan
from tests.nodes.conftest import require
from tests.program import ROOT, clean_environment, run

WORKER = Path(__file__).with_name("memory_worker.py")
STEPS = 40
EVERY = 5
"""Steps between two saves."""
FLAGS = (
    f"--ft-memory-interval={EVERY}",
    "--ft-preload=torch._dynamo,torch.distributed.fsdp,torch.distributed.tensor.parallel",
)


def write_plan(out: Path, faults: Sequence[tuple[int, int, list[int], str]] = (), **more: Any) -> None:
    """Writes what the ranks shall do. `faults`: cycle, step, ranks, and what happens to them."""
    plan = {"kind": "ddp", "width": 32, "steps": STEPS, "faults": list(faults), **more}
    (out / PLAN_FILE).write_text(json.dumps(plan))


def ends(job: Job, nproc: int, start: int) -> list[list[int]]:
    """The job ends well, its last ranks went on from a step, and have the weights of a job without faults.

    Returns the sizes of the files in memory at the end, by rank.
    """
    assert job.finish(120) == 0, job.tail()
    sizes = []
    for rank in range(nproc):
        found = json.loads((job.folder / f"end-{rank}").read_text())
        sizes.append(found.pop("sizes"))
        assert found == {"start": start, "same": True}, job.tail()
    return sizes


SLOW = pytest.mark.slow
FSDP_RUNS = hasattr(torch.cpu.Stream, "record_event")
NEEDS_FSDP = pytest.mark.skipif(
    not FSDP_RUNS, reason="FSDP2 of this torch needs a GPU: its streams on a CPU lack events"
)
SHARDED = "fsdp" if FSDP_RUNS else "tp"
"""A kind of training in which each rank has its own part of the state."""


@pytest.mark.parametrize(
    ("kind", "nproc"),
    [
        ("ddp", 2),
        pytest.param("fsdp", 2, marks=NEEDS_FSDP),
        pytest.param("hsdp", 4, marks=[SLOW, NEEDS_FSDP]),
        pytest.param("tp", 2, marks=SLOW),
    ],
)
def test_one_rank_and_then_all_are_killed(start_job: StartJob, tmp_path: Path, kind: str, nproc: int) -> None:
    faults = [(0, 13, [1], "dies_at_once"), (1, 27, list(range(nproc)), "dies_at_once")]
    write_plan(tmp_path, faults, kind=kind)
    job = start_job(Plan(), nproc, "--max-restarts=2", *FLAGS, script=WORKER)
    ends(job, nproc, start=25)
    assert "ft_launcher: the training goes on from step 10 in memory; 3 steps are lost" in job.output
    assert "ft_launcher: the training goes on from step 25 in memory; 2 steps are lost" in job.output
    assert "ft_client: the training goes on" not in job.output
    loads = job.journal("memory_loaded")
    assert [(load["cycle"], load["tier"], load["step"]) for load in loads] == [
        (0, "none", 0),
        (1, "memory", 10),
        (2, "memory", 25),
    ]
    assert [(load["reached"], load["steps_lost"], load["refused"]) for load in loads] == [
        (0, None, []),
        (13, 3, []),
        (27, 2, []),
    ]
    saves = job.journal("memory_saved")
    assert [(save["cycle"], save["newest"], save["reached"], save["saves"], save["failed"]) for save in saves] == [
        (0, 10, 13, 2, 0),
        (1, 25, 27, 3, 0),
        (2, 40, 40, 3, 0),
    ]
    assert all(0 < save["first_cost_s"] < save["cost_s"] and 0 < save["size"] < save["in_use"] for save in saves)


def test_a_killed_rank_in_the_journal_the_status_and_the_report(start_job: StartJob, tmp_path: Path) -> None:
    """While the job waits in its second cycle, `status` says what the fault has cost; afterwards `report` does."""
    write_plan(tmp_path, [(0, 13, [1], "dies_at_once"), (1, 23, [0, 1], "waits_for_the_test")])
    job = start_job(Plan(), 2, "--max-restarts=1", *FLAGS, script=WORKER)

    def command(*words: str | Path) -> str:
        environment = clean_environment(TMPDIR=str(job.tmp))
        return run([sys.executable, "-m", "ft_launcher", *words], folder=ROOT, environ=environment).stdout

    def said() -> dict[str, Any]:
        text = command("status", "--json")
        if not text:  # the launcher has no socket yet
            return {}
        return json.loads(text)["memory"] or {}

    job.until(lambda: (said().get("newest"), said().get("reached")) == (20, 23), "step 23 in the status")
    found = said()
    assert (found["tier"], found["step"], found["steps_lost"], found["behind"]) == ("memory", 10, 3, 3)
    assert found["saves"] == 4 and 0 < found["size"] < found["in_use"] < found["limit"]
    lines = command("status").splitlines()
    assert lines[2].startswith("last fault: rank 1 died of SIGKILL in cycle 0, 3 steps lost")
    assert lines[3].startswith("in memory: step 20 (3 behind); went on from step 10, 3 steps lost; 4 saves")
    (tmp_path / GO_FILE).touch()
    ends(job, 2, start=10)
    report = command("report", job.journal_folder)
    assert "went on: 1 cycle from memory, 1 cycle from no state in memory; 3 steps lost" in report
    assert "rank-seconds, 3 steps lost: " in report


@pytest.mark.parametrize("what", ["dies_while_it_copies", "dies_before_the_checksum", "dies_before_the_name"])
def test_a_rank_that_is_killed_while_it_saves_leaves_no_generation(
    start_job: StartJob, tmp_path: Path, what: str
) -> None:
    """The save of step 25 is cut off: the job goes on from step 20."""
    write_plan(tmp_path, [(0, 22, [1], what)], kind=SHARDED)
    job = start_job(Plan(), 2, "--max-restarts=1", *FLAGS, script=WORKER)
    ends(job, 2, start=20)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=NEEDS_FSDP)])
def test_saves_that_overlap_with_the_training(start_job: StartJob, tmp_path: Path, kind: str) -> None:
    """A rank is killed behind a save, then all in the middle of a copy: the save of step 35 is cut off."""
    faults = [(0, 13, [1], "dies_at_once"), (1, 32, [0, 1], "dies_behind_the_training")]
    write_plan(tmp_path, faults, kind=kind, overlap=True)
    job = start_job(Plan(), 2, "--max-restarts=2", *FLAGS, script=WORKER)
    ends(job, 2, start=30)
    assert "do not overlap" not in job.output
    assert [save["failed"] for save in job.journal("memory_saved")] == [0, 0, 0]


def test_a_restart_in_process_in_the_middle_of_a_copy_behind_the_training(start_job: StartJob, tmp_path: Path) -> None:
    """The copy ends meanwhile, and nothing has changed: the save of step 25 counts."""
    faults = [(0, 22, [0], "waits_behind_the_training"), (0, 25, [1], "fails")]
    write_plan(tmp_path, faults, in_process=True, overlap=True)
    job = start_job(Plan(), 2, "--max-restarts=0", *FLAGS, script=WORKER)
    ends(job, 2, start=25)


def test_a_flipped_byte_costs_one_generation(start_job: StartJob, tmp_path: Path) -> None:
    write_plan(tmp_path, [(0, 22, [1], "flips_a_byte_and_dies")], kind=SHARDED)
    job = start_job(Plan(), 2, "--max-restarts=1", *FLAGS, script=WORKER)
    ends(job, 2, start=15)
    assert "step 20 in memory is not used: step-20_rank-1-of-2" in job.output
    assert "the checksum of its content is wrong" in job.output
    assert "step 20 in memory is not used: another rank cannot read its file" in job.output
    (refused,) = job.journal("memory_loaded")[1]["refused"]
    assert (refused["step"], refused["rank"]) == (20, 1)
    assert "the checksum of its content is wrong" in refused["reason"]


def test_a_save_that_fails_on_one_rank_is_dropped_by_all(start_job: StartJob, tmp_path: Path) -> None:
    """With one complete generation besides the one in writing, none may be lost for a save that is not whole."""
    faults = [(0, 17, [1], "fails_to_name_a_file_once"), (0, 27, [0], "dies_at_once")]
    faults += [(1, 27, [0], "fails_to_name_a_file_once"), (1, 32, [1], "dies_at_once")]
    write_plan(tmp_path, faults, kind=SHARDED)
    job = start_job(Plan(), 2, "--max-restarts=2", "--ft-memory-keep=1", *FLAGS, script=WORKER)
    ends(job, 2, start=25)
    assert job.output.count("the training goes on from step 25 in memory") == 2
    assert "the state was not saved in memory, which is tried again: OSError: on purpose" in job.output


def test_a_launcher_that_was_killed_is_started_again(start_job: StartJob, tmp_path: Path) -> None:
    write_plan(tmp_path, [(0, 33, [0], "kills_the_launcher")])
    first = start_job(Plan(), 2, *FLAGS, script=WORKER)
    assert first.finish(120) == 128 + signal.SIGKILL
    write_plan(tmp_path)
    second = start_job(Plan(), 2, *FLAGS, script=WORKER, name="second")
    ends(second, 2, start=30)
    assert "the training goes on from step 30 in memory; 3 steps are lost" in second.output


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", (2, 1)), pytest.param("fsdp", (3, 2), marks=NEEDS_FSDP)])
def test_a_job_goes_on_with_fewer_ranks_after_all_were_killed(
    start_job: StartJob, tmp_path: Path, kind: str, ranks: tuple[int, int]
) -> None:
    """The second start takes the files over, is killed before its first save, and the third still has them."""
    write_plan(tmp_path, [(0, 33, [0], "kills_the_launcher")], kind=kind, notes_weights=30)
    first = start_job(Plan(), ranks[0], *FLAGS, script=WORKER)
    assert first.finish(120) == 128 + signal.SIGKILL
    write_plan(tmp_path, [(0, 33, list(range(ranks[1])), "dies_at_once")], kind=kind, notes_weights=35)
    second = start_job(Plan(), ranks[1], "--max-restarts=1", *FLAGS, script=WORKER, name="second")
    assert second.finish(120) == 0, second.tail()
    saved = torch.load(tmp_path / f"saved-{ranks[0]}-30")
    loaded = torch.load(tmp_path / f"loaded-{ranks[0]}-30")
    assert all(torch.equal(*pair) for pair in zip(saved, loaded, strict=True))
    line = f"step 30 in memory is of {ranks[0]} ranks and was put together for {ranks[1]}: random numbers"
    assert second.output.count(line) == 2, second.tail()
    loads = second.journal("memory_loaded")
    assert [(load["step"], load["world"], load["saved_world"]) for load in loads] == [(30, ranks[1], ranks[0])] * 2


def test_state_in_replicas_lies_in_memory_once_per_node(start_job: StartJob, tmp_path: Path) -> None:
    write_plan(tmp_path, width=256)
    first, second = ends(start_job(Plan(), 2, *FLAGS, script=WORKER), 2, start=0)
    assert len(first) == len(second) == 3
    assert min(first) > 3 * 2 * 256 * 256 * 4
    assert max(second) < 100_000


def test_a_restart_in_process_in_the_middle_of_a_save(start_job: StartJob, tmp_path: Path) -> None:
    faults = [(0, 22, [0], "waits_while_it_copies"), (0, 25, [1], "fails")]
    write_plan(tmp_path, faults, in_process=True)
    job = start_job(Plan(), 2, "--max-restarts=0", *FLAGS, script=WORKER)
    ends(job, 2, start=20)


FOLDERS = """
import os, signal, sys
from pathlib import Path
import torch.distributed as dist
import ft_client as ft

dist.init_process_group("gloo")
rank, cycle = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
found = ft.latest_memory_folder()
if cycle == 0:
    assert found is None
    for step in (1, 2, 3):
        with ft.memory_folder(step, is_collective=False) as folder:
            (folder / f"{rank}").write_text(f"{step}")
            if (rank, step) == (1, 3):
                raise RuntimeError("on purpose")
    dist.barrier()
    with ft.memory_folder(4) as folder:
        (folder / f"{rank}").write_text("half")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
assert (found / f"{rank}").read_text() == "2", found
Path(sys.argv[-1], f"end-{rank}").touch()
dist.destroy_process_group()
"""


def test_a_folder_is_complete_on_all_ranks_or_never_there(start_job: StartJob, tmp_path: Path) -> None:
    script = tmp_path / "folders.py"
    script.write_text(FOLDERS)
    job = start_job(Plan(), 2, "--max-restarts=1", script=script)
    assert job.finish(120) == 0, job.tail()
    assert {file.name for file in tmp_path.glob("end-*")} == {"end-0", "end-1"}
    assert "step 3 was not saved in memory: RuntimeError: on purpose" in job.output


def test_a_memory_that_is_too_small_is_said_and_the_training_goes_on(start_job: StartJob, tmp_path: Path) -> None:
    require(own_shm.why_not())
    write_plan(tmp_path, width=400)
    place = Place(start=partial(own_shm.start_with_own_shm, mib=4))
    job = start_job(Plan(), 2, *FLAGS, script=WORKER, place=place)
    ends(job, 2, start=0)
    assert job.output.count("no state is kept in memory: 3 files of 3.7 MiB do not fit") == 1, job.tail()
