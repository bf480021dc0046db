"""Background processes of successful ranks finish within `--ft-linger`; then, or at a signal, they are ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left
from tests.faults.job import Job, lives
from tests.faults.test_in_process import SCRIPT, holding, say, wants_to_join
from tests.faults.training import Plan

UPLOAD = """
import pathlib, subprocess, sys, time
folder, rank = pathlib.Path(sys.argv[1]), sys.argv[2]
while not (folder / "upload").exists():
    time.sleep(0.01)
(folder / f"uploaded-{rank}").touch()
subprocess.Popen(["sh", "-c", f"sleep 0.1; touch {folder}/last-{rank}"], start_new_session=True)
"""
RANK = """
import os, pathlib, subprocess, sys
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
upload = [sys.executable, "-S", str(folder / "upload.py"), str(folder), rank]
pids = [subprocess.Popen(upload, start_new_session=True).pid, subprocess.Popen(["sleep", "3600"]).pid]
(folder / f"pids-{rank}").write_text(" ".join(map(str, pids)))
"""
IN_PROCESS = f"""
import pathlib, runpy, sys
if not pathlib.Path(sys.argv[1], "pids-" + __import__("os").environ["RANK"]).exists():
    exec({RANK!r})
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def start(start_job: StartJob, folder: Path, *flags: str, rank: str = RANK, nproc: int = 1) -> Job:
    (folder / "upload.py").write_text(UPLOAD)
    script = folder / "rank.py"
    script.write_text(rank)
    return start_job(Plan(), nproc, *flags, script=script)


def lingers(job: Job, nproc: int = 1) -> None:
    """Waits until the launcher waits for each rank's upload; what is in the ranks' own sessions is gone then."""
    (line,) = job.until(lambda: job.journal("lingers"), "the launcher waits")
    for rank in range(nproc):
        upload, in_session = (job.folder / f"pids-{rank}").read_text().split()
        assert "upload.py" in line["processes"][upload] and in_session not in line["processes"], job.tail()
        assert lives(int(upload)) and not lives(int(in_session)), job.tail()


@pytest.mark.parametrize("warm_start", ["on", "off"])
def test_an_upload_finishes(start_job: StartJob, tmp_path: Path, warm_start: str) -> None:
    """Also what it starts itself at its end."""
    job = start(start_job, tmp_path, "--ft-linger=none", f"--ft-warm-start={warm_start}", nproc=2)
    lingers(job, 2)
    (tmp_path / "upload").touch()
    assert job.finish() == 0, job.tail()
    assert all((tmp_path / f"{what}-{rank}").exists() for what in ("uploaded", "last") for rank in (0, 1)), job.tail()
    assert not job.journal("background_ended"), job.tail()
    nothing_left(job)


@pytest.mark.parametrize("limit", ["0", "0.2"])
def test_one_that_goes_on_is_ended(start_job: StartJob, tmp_path: Path, limit: str) -> None:
    job = start(start_job, tmp_path, f"--ft-linger={limit}")
    assert job.finish() == 0, job.tail()
    upload = (tmp_path / "pids-0").read_text().split()[0]
    assert job.output.count(f"--ft-linger is over; ends what the ranks left running: {upload} (") == int(limit != "0")
    assert len(job.journal("background_ended")) == len(job.journal("lingers")) == int(limit != "0"), job.tail()
    nothing_left(job)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait(start_job: StartJob, tmp_path: Path, number: signal.Signals) -> None:
    """The training is complete: that is not a failure."""
    job = start(start_job, tmp_path, "--ft-linger=none")
    lingers(job)
    job.process.send_signal(number)
    assert job.finish() == 0, job.tail()
    assert f"got {number.name}; ends what the ranks left running: " in job.output, job.tail()
    nothing_left(job)


@pytest.mark.parametrize("comes_back", [True, False], ids=["comes back", "stays away"])
def test_what_a_rank_that_died_in_process_left_is_ended(start_job: StartJob, tmp_path: Path, comes_back: bool) -> None:
    """Whether the one that was started again took part or not: it left nothing. Rank 0's goes on."""
    job = start(start_job, tmp_path, "--ft-linger=none", rank=IN_PROCESS, nproc=2)
    os.kill(holding(job, "0-0", {0, 1})[1], signal.SIGKILL)
    holding(job, "0-1", {0})
    job.until(lambda: job.journal("started_again") and wants_to_join(job, 1), "the rank to ask to join")
    if comes_back:
        say(job, "0-1", "raise 0")
        holding(job, "0-2", {0, 1})
    say(job, "0-2" if comes_back else "0-1", "go")
    lingers(job)
    assert not lives(int((tmp_path / "pids-1").read_text().split()[0])), job.tail()
    (tmp_path / "upload").touch()
    assert job.finish() == 0, job.tail()
    nothing_left(job)
