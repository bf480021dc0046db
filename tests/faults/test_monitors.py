"""Monitors and their template die or are stopped: the training goes on, and a hang is seen all the same."""

from __future__ import annotations

import signal

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import Told, holds, nothing_left
from tests.faults.job import Job, kill
from tests.faults.training import Plan, PlannedFault
from tests.program import suspend

RANKS = [pytest.param(1, marks=pytest.mark.slow), 2]  # with two, the one with the fault has a neighbour
HOLD = 3
LIMIT_S = 1.0
IN_STEP = ("--max-restarts=1", "--ft-rank-section-timeouts=step:3")
HANG_IN_STEP = PlannedFault("sleep", "step", 4, rank=0)


def replaced(job: Job) -> list[tuple[int, str]]:
    return [(line["rank"], line["why"]) for line in job.journal("monitor_replaced")]


def has_fault(job: Job) -> bool:
    return any((job.folder / "injected").glob("0-*"))


@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGKILL, "it died"), (signal.SIGSTOP, "it was stopped")], ids=["killed", "stopped"]
)
@pytest.mark.parametrize("nproc", RANKS)
def test_a_lost_monitor_is_replaced_and_the_training_goes_on(
    start_job: StartJob, nproc: int, number: int, why: str
) -> None:
    """The one that took its place watches: a hang that comes after is seen."""
    job = start_job(Plan((HANG_IN_STEP,), hold=HOLD), nproc, *IN_STEP)
    pids = job.until_ranks_train(HOLD)
    kill(job.monitor(0), number)
    job.until(lambda: replaced(job), "the monitor is replaced")
    assert job.ranks(0) == pids
    job.go()
    holds(job, 0, [Told("hang", {0}, "section:step")])
    assert replaced(job) == [(0, why)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize(("what", "limit"), [("sleep", "section:step"), ("wait with the GIL", "reconnect")])
def test_a_monitor_lost_while_its_rank_hangs(start_job: StartJob, what: str, limit: str, number: int) -> None:
    """A rank that cannot even connect to the new one is given the longest limit for that."""
    largest = ("--ft-rank-heartbeat-timeout=4", "--ft-initial-rank-heartbeat-timeout=4")
    job = start_job(Plan((PlannedFault(what, "step", 4, rank=0),)), 1, *IN_STEP, *largest)
    job.until(lambda: has_fault(job), "the rank hangs")
    kill(job.monitor(0), number)
    holds(job, 0, [Told("hang", {0}, limit)])
    assert len(replaced(job)) == 1


def test_a_monitor_lost_together_with_its_rank(start_job: StartJob) -> None:
    job = start_job(Plan(hold=HOLD), 2, "--max-restarts=1")
    pids = job.until_ranks_train(HOLD)
    kill(job.monitor(1))
    kill(pids[1])
    job.go()
    holds(job, 0, [Told("signal", {1})])
    assert replaced(job) == [(1, "it died")]


@pytest.mark.parametrize("nproc", RANKS)
def test_rank_and_monitor_stopped_together_and_continued(start_job: StartJob, nproc: int) -> None:
    """As when a machine is suspended: for longer than every limit, and nobody is to blame."""
    limits = (f"--ft-rank-heartbeat-timeout={LIMIT_S}", f"--ft-rank-section-timeouts=waiting:60,step:{LIMIT_S}")
    job = start_job(Plan(hold=HOLD), nproc, *limits)
    ranks = job.until_ranks_train(HOLD)
    paused = [pid for rank in ranks for pid in (job.monitor(rank), ranks[rank])]
    suspend(paused, 2.5 * LIMIT_S)
    job.until(lambda: job.output.count("stood still") == nproc, "the monitors notice")
    job.go()
    holds(job, 0)
    assert replaced(job) == []


def test_the_template_is_killed(start_job: StartJob) -> None:
    """Monitors stay, one that is lost after it is replaced, cycles follow."""
    job = start_job(Plan((HANG_IN_STEP,), hold=HOLD), 2, *IN_STEP)
    job.until_ranks_train(HOLD)
    kill(job.template())
    kill(job.monitor(1))
    job.until(lambda: replaced(job), "the monitor is replaced")
    job.go()
    holds(job, 0, [Told("hang", {0}, "section:step")])
    assert replaced(job) == [(1, "it died")]


def test_the_template_is_killed_and_then_the_launcher(start_job: StartJob) -> None:
    job = start_job(Plan(hold=HOLD), 2)
    job.until_ranks_train(HOLD)
    kill(job.template())
    job.process.kill()
    assert job.finish() == 137
    nothing_left(job)
