"""What ranks start and leave behind is gone: after each restart, the clean end, SIGTERM and SIGKILL of the launcher."""

from __future__ import annotations

import signal

import pytest

from tests.faults import children
from tests.faults.conftest import StartJob
from tests.faults.invariants import Told, holds, nothing_left
from tests.faults.job import Job, kill
from tests.faults.training import Plan, PlannedFault

HOLD = 4


def started_children(job: Job, nproc: int) -> list[children.Child]:
    """Waits until the ranks train and hold; returns what they started, all of it alive."""
    job.until_ranks_train(HOLD)
    found = job.children()
    assert [child.kind for child in found] == [*children.KINDS] * nproc
    assert all(child.alive for child in found), job.tail()
    return found


@pytest.mark.parametrize("nproc", [1, 2])
def test_gone_after_each_restart_and_the_clean_end(start_job: StartJob, nproc: int) -> None:
    """Each cycle's ranks look for what the last one left; after the end the test does."""
    faults = (PlannedFault("exit 3", rank=0), PlannedFault("SIGKILL", "between", 5, rank=nproc - 1))
    job = start_job(Plan(faults, children=children.KINDS), nproc, "--max-restarts=2", "--ft-linger=0")
    holds(job, 0, [Told("exit", {0}), Told("signal", {nproc - 1})])
    assert len(job.children()) == 3 * nproc * len(children.KINDS)


@pytest.mark.parametrize("nproc", [1, 2])
def test_gone_after_sigterm_of_the_launcher(start_job: StartJob, nproc: int) -> None:
    job = start_job(Plan(children=children.KINDS, hold=HOLD), nproc)
    started_children(job, nproc)
    job.process.send_signal(signal.SIGTERM)
    holds(job, 86)


@pytest.mark.parametrize("nproc", [1, 2])
def test_gone_after_sigkill_of_the_launcher(start_job: StartJob, nproc: int) -> None:
    """Monitors and template sweep by the tag in the environment; a daemon that emptied it is the limit of that."""
    job = start_job(Plan(children=children.KINDS, hold=HOLD), nproc)
    found = started_children(job, nproc)
    job.process.kill()
    assert job.finish() == 137
    nothing_left(job, limits={children.BARE})
    for child in found:
        if child.alive:
            kill(child.pid)
