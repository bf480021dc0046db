"""Signals that were ignored when the launcher started, as under `nohup` and in a shell script's background: they stay
ignored in launcher, zygote and ranks. SIGTERM ends the job all the same, and exit codes of ranks are read."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Collection
from functools import partial
from pathlib import Path

import pytest

from rank_monitor.contract.processes import proc
from tests.faults.conftest import StartJob
from tests.faults.invariants import Told, holds, nothing_left
from tests.faults.job import Place
from tests.faults.training import Plan, PlannedFault

HOLD = 3
LEFT = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
STARTS = pytest.mark.parametrize("start", ["auto", "off"])


def ignoring(numbers: Collection[int]) -> Place:
    """Where these signals are ignored."""

    def ignore() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    return Place(start=partial(subprocess.Popen, preexec_fn=ignore))


def ignored(pid: int) -> set[int]:
    mask = int(proc.status(pid)["SigIgn"], 16)
    return {number for number in (*LEFT, signal.SIGTERM, signal.SIGCHLD) if mask >> (number - 1) & 1}


@STARTS
def test_they_end_nothing(start_job: StartJob, start: str) -> None:
    job = start_job(Plan(hold=HOLD), 2, f"--ft-warm-start={start}", place=ignoring(LEFT))
    ranks = job.until_ranks_train(HOLD)
    for pid in (job.process.pid, *ranks.values()):
        assert ignored(pid) == set(LEFT), job.tail()
        for number in LEFT:
            os.kill(pid, number)
    job.go()
    holds(job, 0)
    assert "was ignored" not in job.output, job.tail()


@STARTS
def test_sigterm_ends_the_job_all_the_same(start_job: StartJob, start: str) -> None:
    job = start_job(Plan(hold=HOLD), 1, f"--ft-warm-start={start}", place=ignoring([signal.SIGTERM]))
    ranks = job.until_ranks_train(HOLD)
    assert signal.SIGTERM not in ignored(ranks[0])
    assert job.output.count("SIGTERM was ignored when the launcher started. It ends the job all the same") == 1
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 86, job.tail()
    nothing_left(job)


@STARTS
def test_exit_codes_are_read_where_children_are_ignored(start_job: StartJob, start: str) -> None:
    plan = Plan((PlannedFault("exit 3", rank=1),))
    job = start_job(plan, 2, "--max-restarts=1", f"--ft-warm-start={start}", place=ignoring([signal.SIGCHLD]))
    holds(job, 0, [Told("exit", {1})])
    assert [fault["exit_code"] for fault in job.journal("fault")] == [3], job.tail()


def test_under_nohup(start_job: StartJob, tmp_path: Path) -> None:
    """The terminal goes away: all processes of its session get SIGHUP."""

    def start(words: list[str], **more: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["nohup", *words], **more)  # type: ignore[call-overload, no-any-return]

    job = start_job(Plan(hold=HOLD), 2, place=Place(start=start))
    job.until_ranks_train(HOLD)
    job.process.send_signal(signal.SIGHUP)
    job.go()
    holds(job, 0)
