"""Real DDP over gloo: a rank fails amid collectives, and the weights come out as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import Told, healthy_ranks_live, journal_tells, nothing_left
from tests.faults.training import DDP_STEPS, Plan, PlannedFault, ddp_weight

WORLD = 2
DDP_WORKER = Path(__file__).with_name("ddp_worker.py")
CRASH_WORKER = Path(__file__).with_name("crash_worker.py")
CRASHES = 100


DEATHS = [Told("exception", {1}), Told("signal", {1})]
HANG = [Told("hang", {1}, "section:step")]


@pytest.mark.parametrize(
    ("faults", "story", "flags"),
    [
        ([PlannedFault("exception", "step", 2, rank=1), PlannedFault("SIGKILL", "step", 4, rank=1)], DEATHS, ()),
        ([PlannedFault("SIGSTOP", "step", 3, rank=1)], HANG, ("--ft-rank-section-timeouts=step:5",)),
    ],
    ids=["exception, SIGKILL", "SIGSTOP"],
)
def test_recovers_with_the_same_weights(
    start_job: StartJob, faults: list[PlannedFault], story: list[Told], flags: tuple[str, ...]
) -> None:
    quick = "--ft-preload=torch._dynamo"  # what DDP imports, or each rank of each cycle would
    job = start_job(Plan(tuple(faults)), WORLD, "--max-restarts=2", quick, *flags, script=DDP_WORKER)
    assert job.finish(120) == 0, job.tail()
    nothing_left(job)
    assert (job.folder / "ddp").read_text() == f"{DDP_STEPS} {ddp_weight(WORLD)}"
    faults = job.journal("fault")
    assert [(fault["kind"], fault["rank"]) for fault in faults] == [(told.kind, 1) for told in story], job.tail()
    if story is DEATHS:  # a rank that waits for a stopped one passes the same limit: both are condemned, one is blamed
        healthy_ranks_live(job, story)
        journal_tells(job, 0, story)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_hundred_single_crashes_are_all_recovered(start_job: StartJob) -> None:
    job = start_job(Plan(), WORLD, f"--max-restarts={CRASHES}", script=CRASH_WORKER)
    assert job.finish(1400) == 0, job.tail()
    faults = job.journal("fault")
    assert [(fault["cycle"], fault["kind"]) for fault in faults] == [(cycle, "signal") for cycle in range(CRASHES)]
    assert [fault["rank"] for fault in faults] == [cycle % 2 for cycle in range(CRASHES)]
    assert job.journal("left_over") == []
