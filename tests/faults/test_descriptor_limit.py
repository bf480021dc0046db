"""RLIMIT_NOFILE of the launcher is lowered while it runs: the next restart waits and says so, and then comes."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from rank_monitor.contract.exit_codes import ExitCode
from tests.faults.conftest import StartJob
from tests.faults.invariants import Told, holds, nothing_left
from tests.faults.job import Job
from tests.faults.training import Plan, PlannedFault
from tests.program import python

HOLD = 3
PLAN = Plan((PlannedFault("exception", "between", HOLD + 1, rank=1),), hold=HOLD)


def lower(job: Job, both: bool) -> tuple[int, int]:
    """Lowers the launcher's limit to what it has open; returns what it was."""
    pid = job.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    held = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (held, held if both else before[1]))
    return before


def test_the_soft_limit_is_raised_again(start_job: StartJob) -> None:
    job = start_job(PLAN, 2, "--max-restarts=1")
    job.until_ranks_train(HOLD)
    lower(job, both=False)
    job.go()
    holds(job, 0, [Told("exception", {1})])
    assert job.output.count("RLIMIT_NOFILE of the launcher was lowered") == 1, job.tail()


@pytest.mark.parametrize("end", ["success", "SIGTERM"])
def test_the_hard_limit_is_lowered_too(start_job: StartJob, end: str) -> None:
    """The launcher falls back on what it held back, twice; and it ends as ever."""
    faults = [PlannedFault("exception", "between", HOLD + 1 + number, rank=number) for number in range(2)]
    job = start_job(Plan(tuple(faults), saves_on_sigterm=True, hold=HOLD), 2, "--max-restarts=2")
    job.until_ranks_train(HOLD)
    lower(job, both=True)
    if end == "SIGTERM":
        job.process.send_signal(signal.SIGTERM)
        assert job.finish() == ExitCode.PREEMPTED, job.tail()
        nothing_left(job)
        return
    job.go()
    holds(job, 0, [Told("exception", {0}), Told("exception", {1})])
    assert "it uses its reserve" in job.output, job.tail()


WAITS = """
import logging, resource, sys
from ft_launcher.node.processes.descriptor_limit import Reserve
logging.basicConfig(format="%(message)s")
limit = 200 if sys.argv[1] == "lowered" else 20
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
reserve = Reserve(2)
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
waits = []
def wait(limit_s):
    waits.append(limit_s)
    return 15 if len(waits) == 3 else None
print(reserve.await_enough(wait), len(waits))
"""


@pytest.mark.parametrize(("limit", "waits"), [("lowered", 3), ("always tight", 0)])
def test_without_a_reserve_it_waits(limit: str, waits: int) -> None:
    """For a limit that was lowered, with one line, until it is told to end; not for one that was there before."""
    done = python(WAITS, limit)
    assert done.stdout.split() == ["False", str(waits)]
    assert done.stderr.count("it waits") == min(waits, 1)
