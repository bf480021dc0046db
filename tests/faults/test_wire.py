"""Nonsense on the monitor's socket, strangers beside the rank, another user: training and watch go on unharmed."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import Told, holds
from tests.faults.training import Plan, PlannedFault

NOBODY = 65534
HOLD = 3
LIMITS = ("--max-restarts=1", "--ft-rank-section-timeouts=step:2,waiting:60", "--ft-rank-heartbeat-timeout=60")


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("what", ["nonsense", "strangers"])
def test_what_a_rank_sends_harms_nothing(start_job: StartJob, what: str, nproc: int) -> None:
    """No verdict; and the watch goes on: the hang that follows is seen."""
    plan = Plan((PlannedFault(what, "step", 2), PlannedFault("sleep", "step", 4, rank=nproc - 1)))
    job = start_job(plan, nproc, *LIMITS)
    holds(job, 0, [Told("hang", {nproc - 1}, "section:step")])
    assert job.journal("monitor_replaced") == [], job.tail()


def test_a_rank_that_floods_its_launcher_is_throttled(start_job: StartJob) -> None:
    """20 MB of reports: the monitor of each rank passes on a bounded part and says so once; the watch goes on."""
    plan = Plan((PlannedFault("flood", "step", 2), PlannedFault("sleep", "step", 4, rank=1)))
    job = start_job(plan, 2, *LIMITS)
    holds(job, 0, [Told("hang", {1}, "section:step")])
    assert 1 <= len(job.journal("section_times")) < 100
    assert job.output.count("not passed on to the launcher") == 2, job.tail()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def connect_as_nobody(path: Path) -> int:
    """The errno another user's process gets at `path`; 0 when it connects and is then let go by the other side."""
    child = os.fork()
    if child == 0:
        code = 255
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.settimeout(30)
                code = stranger.connect_ex(str(path))
                while code == 0 and stranger.recv(1 << 16):
                    pass
        except ConnectionError:
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")
def test_another_user_cannot_speak_to_a_monitor(start_job: StartJob, open_folder: Path) -> None:
    job = start_job(Plan(hold=HOLD), 1, *LIMITS, tmp=open_folder / "tmp")
    job.tmp.chmod(0o755)
    job.until_ranks_train(HOLD)
    folder = job.runtime_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir() if file.is_socket()} == {0o600}
    path = folder / "m0"
    assert connect_as_nobody(path) == errno.EACCES
    folder.chmod(0o755)
    assert connect_as_nobody(path) == errno.EACCES
    path.chmod(0o666)
    assert connect_as_nobody(path) == 0, "another user was not let go"
    job.until(lambda: f"Refused: uid {NOBODY}" in job.output, "the refusal of another user")
    job.go()
    holds(job, 0)
