"""Launcher, template, zygote and monitors are killed: the ranks end with all that they started, and the folder goes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults import children
from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left
from tests.faults.job import Job, kill, lives
from tests.faults.training import Plan

HOLD = 4
OURS = ("ft_template", "ft_zygote", "ft_monitor0", "ft_monitor1")
SWEEPER = "ft_sweeper"


def named(job: Job, *names: str) -> list[int]:
    """The pids of the job's processes of these names."""
    found = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in job.processes()}
    return [pid for pid, name in found.items() if name in names]


def begin(start_job: StartJob, *flags: str) -> Job:
    """A job that trains, each rank with children of every kind that carries the job's tag."""
    kinds = tuple(kind for kind in children.KINDS if kind != children.BARE)
    job = start_job(Plan(children=kinds, hold=HOLD), 2, *flags)
    job.until_ranks_train(HOLD)
    found = job.children()
    assert len(found) == 2 * len(kinds) and all(child.alive for child in found), job.tail()
    return job


@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped, then killed"])
@pytest.mark.parametrize("start", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_all_are_killed_at_once(start_job: StartJob, start: str, stopped: bool) -> None:
    """Stopped ones see nothing of the others' end. The ranks and their daemons end all the same."""
    job = begin(start_job, f"--ft-warm-start={start}")
    victims = [*named(job, *OURS), job.process.pid]
    assert len(victims) == (5 if start == "auto" else 4), job.tail()
    for number in (signal.SIGSTOP, signal.SIGKILL) if stopped else (signal.SIGKILL,):
        for pid in victims:
            os.kill(pid, number)
    assert job.finish() == 137
    nothing_left(job)


def test_the_launcher_alone_is_killed_while_all_others_are_stopped(start_job: StartJob) -> None:
    job = begin(start_job)
    for pid in named(job, *OURS):
        os.kill(pid, signal.SIGSTOP)
    job.process.kill()
    assert job.finish() == 137
    nothing_left(job)


def test_it_is_in_a_session_of_its_own_and_outlives_the_template(start_job: StartJob) -> None:
    """A cycle that ends takes it for none of the ranks' processes."""
    job = start_job(Plan(hold=HOLD), 2, "--max-restarts=1")
    job.until_ranks_train(HOLD)
    (sweeper,) = named(job, SWEEPER)
    assert os.getsid(sweeper) == sweeper
    kill(job.template())
    kill(job.ranks(0)[1])
    job.until_ranks_train(HOLD, cycle=1)
    assert lives(sweeper), job.tail()
    job.go()
    assert job.finish() == 0, job.tail()
    nothing_left(job)


def test_the_next_run_removes_the_folder_of_a_dead_one_and_no_other(start_job: StartJob) -> None:
    dead = begin(start_job)
    (folder,) = dead.tmp.glob("ft-*")
    lasting = start_job(Plan(hold=HOLD), 1, name="lasting", tmp=dead.tmp)
    lasting.until_ranks_train(HOLD, world=1)
    for pid in [*named(dead, SWEEPER, *OURS), dead.process.pid]:
        os.kill(pid, signal.SIGSTOP)
    dead.kill_all()
    assert folder.is_dir(), "nobody was left to remove it"
    start_job(Plan(), 1, name="next", tmp=dead.tmp).finish()
    lasting.go()
    assert lasting.finish() == 0, lasting.tail()
    nothing_left(lasting)
