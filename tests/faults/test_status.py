"""What real jobs say of themselves while they run, hang and restart; and what asking costs them: nothing."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rank_monitor.contract.exit_codes import ExitCode
from tests.faults.conftest import StartJob
from tests.faults.job import Job
from tests.faults.training import Plan, PlannedFault
from tests.patience import patient
from tests.ports import free_port
from tests.program import ROOT, clean_environment, run

LIMIT_S = 60
STALL_WORKER = Path(__file__).with_name("stall_worker.py")


def command(job: Job, *words: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(TMPDIR=str(job.tmp))
    return run([sys.executable, "-m", "ft_launcher", *words], folder=ROOT, environ=environment, limit_s=LIMIT_S)


def status(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command(job, "status", job_id(job), "--json").stdout)
    return found


def job_id(job: Job) -> str:
    return str(job.journal("job_start")[0]["job_name"])


def get(at: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", at, timeout=patient(LIMIT_S))
    connection.request("GET", path)
    response = connection.getresponse()
    found = response.status, response.read().decode()
    connection.close()
    return found


def test_a_healthy_job(start_job: StartJob) -> None:
    """By command, and by both ports."""
    port, metrics = free_port(), free_port()
    job = start_job(Plan(hold=4), 2, f"--ft-status-port={port}", f"--ft-metrics-port={metrics}")
    job.until_ranks_train()
    job.until(lambda: all(rank["iteration"] == 3 for rank in status(job)["ranks"]), "the ranks to come to iteration 4")
    done = command(job, "status", job_id(job)[:8])
    first, second, third = done.stdout.splitlines()
    assert done.returncode == 0 and re.fullmatch(rf"{job_id(job)} on \S+: running, cycle 0, step 3, .*", first)
    assert second.startswith("2 ranks here: 2 training; the most silent is rank ")
    assert third.startswith("no fault so far; ")
    found = json.loads(get(port, "/status.json")[1])
    assert found["state"] == "running" and {rank["pid"] for rank in found["ranks"]} == set(job.ranks(0).values())
    assert get(port, "/healthz") == get(port, "/readyz") == (200, "ok\n")
    text = get(metrics, "/metrics")[1]
    assert "ft_launcher_step 3.0\n" in text and 'ft_launcher_rank_state{rank="1",state="training"} 1.0\n' in text
    job.go()
    assert job.finish() == 0, job.tail()
    gone = command(job, "status", job_id(job))
    assert (gone.returncode, gone.stdout) == (4, "") and "no job of this user with a name or run id" in gone.stderr


def test_stacks_of_ranks_at_the_same_place_are_one(start_job: StartJob) -> None:
    job = start_job(Plan(hold=4), 2)
    job.until_ranks_train()
    job.until(lambda: all(rank["iteration"] == 3 for rank in status(job)["ranks"]), "the ranks to come to iteration 4")

    def stacks_of_both() -> str:
        done = command(job, "stacks", job_id(job))
        assert done.returncode == 0, done
        if done.stdout.startswith("ranks 0-1:\n  "):
            return done.stdout
        return ""

    # A rank that is held looks for a file again and again: now and then one of the two is just in that look.
    found = job.until(stacks_of_both, "both ranks at the same place")
    assert "training" in found or "worker.py" in found
    assert not job.journal("fault", "verdict"), "the ranks go on"
    job.go()
    assert job.finish() == 0, job.tail()


def test_a_rank_that_hangs_and_a_restart(start_job: StartJob) -> None:
    """The status of the cycle after it has the fault, with what followed."""
    fault = PlannedFault("sleep", iteration=4, rank=1)
    port = free_port()
    flags = ("--max-restarts=1", "--ft-rank-section-timeouts=step:2", f"--ft-status-port={port}")
    job = start_job(Plan((fault,), hold=6), 2, *flags)
    job.until(lambda: job.journal("decision"), "the decision")
    job.until(lambda: status(job)["state"] == "running" and status(job)["cycle"] == 1, "the next cycle")
    found = status(job)
    (fault,) = found["faults"]
    assert (fault["rank"], fault["fault_class"], fault["cycle"]) == (1, "hang", 0)
    assert fault["next"].startswith("restart: ")
    assert (fault["number"], fault["has_stacks"]) == (1, True)
    scene = json.loads(get(port, "/fault.json?number=1")[1])
    assert sorted(rank for group in scene["stacks"] for rank in group["ranks"]) == [0, 1]
    assert all(group["frames"] for group in scene["stacks"])
    before, now = found["cycles"]
    assert (before["cycle"], before["how"], now["cycle"], now["how"]) == (0, "failed", 1, "")
    assert now["recovery"]["detection"] > 0
    limit = next(one for one in json.loads(get(port, "/settings.json")[1])["settings"] if one["value"] == {"step": 2.0})
    assert (limit["key"], limit["source"]) == ("rank_section_timeouts", "--ft-rank-section-timeouts")
    assert found["restarts"] == 1 and "1 fault" in found["sentence"]
    job.until(lambda: status(job)["steps_lost"] > 0, "the steps that are done again, while the cycle runs")
    job.go()
    assert job.finish() == 0, job.tail()


def test_a_stall_that_no_limit_ends(start_job: StartJob) -> None:
    job = start_job(Plan((PlannedFault("sleep", iteration=4, rank=1),)), 2, "--ft-stall-warning=2")
    job.until(lambda: job.journal("stall"), "the warning")
    for _ in range(2):  # the first reading after the warning is no progress
        done = command(job, "status", job_id(job))
        assert done.returncode == 3 and f"{job_id(job)} on " in done.stdout and ": hung in cycle 0" in done.stdout
    done = command(job, "stacks", job_id(job))
    assert done.returncode == 0 and {"rank 0:", "rank 1:"} <= set(done.stdout.splitlines()), done
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == ExitCode.PREEMPTED, job.tail()


def test_a_training_that_makes_no_steps(start_job: StartJob, tmp_path: Path) -> None:
    """No limit is set, so nothing ends the ranks; every view says whom they wait for, and no second of it is a step."""
    port = free_port()
    job = start_job(Plan(), 3, f"--ft-status-port={port}", script=STALL_WORKER)

    def after_twenty_steps() -> dict[str, Any]:
        found = status(job) if job.journal("cycle_start") else {}
        if found and found["state"] == "running" and found["times"]["steps"] >= 20:
            return found
        return {}

    well = job.until(after_twenty_steps, "twenty steps")
    assert "detection" not in well["times"]["seconds"]
    stacks = job.runtime_folder() / "stacks0"
    assert stacks.stat().st_size == 0, "nobody is asked while all is well"
    stopped = well["ranks"][2]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    found = job.until(lambda: (now := status(job))["state"] == "stalled" and now, "the stall")
    asked = stacks.stat().st_size
    assert re.fullmatch(
        r"no step for \d+ s, [\d,]+ times the usual one; rank 2 is stopped, 2 ranks wait for it", found["trouble"]
    )
    assert [rank["state"] for rank in found["ranks"]] == ["stalled"] * 3
    assert found["collectives"]["silent"] == [{"ranks": [2], "why": "no answer, stopped"}]
    done = command(job, "status", job_id(job))
    assert done.returncode == 3 and ": stalled in cycle 0, step " in done.stdout, done
    later = status(job)
    assert later["times"]["seconds"]["detection"] > found["times"]["seconds"]["detection"] > 0
    assert later["times"]["seconds"]["step"] == pytest.approx(found["times"]["seconds"]["step"], abs=0.01)
    assert later["times"]["goodput"] < found["times"]["goodput"]
    assert stacks.stat().st_size == asked > 0, "the ranks were asked once"
    assert get(port, "/healthz") == (200, "ok\n")
    os.kill(stopped, signal.SIGCONT)
    job.until(lambda: status(job)["state"] == "running", "the ranks to go on")
    (tmp_path / "done").touch()
    assert job.finish() == 0, job.tail()
    assert not job.journal("verdict", "stall", "fault")


def test_a_launcher_that_stands_still_is_not_healthy(start_job: StartJob) -> None:
    """Its server stands still, too: nothing is answered, and a probe fails by its own limit."""
    at = free_port()
    job = start_job(Plan(hold=4), 1, f"--ft-status-port={at}")
    job.until_ranks_train()
    os.kill(job.process.pid, signal.SIGSTOP)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", at, timeout=1)
        connection.request("GET", "/healthz")
        with pytest.raises(TimeoutError):
            connection.getresponse()
    finally:
        os.kill(job.process.pid, signal.SIGCONT)
    assert get(at, "/healthz") == (200, "ok\n")
    job.go()
    assert job.finish() == 0, job.tail()


def test_commands_about_a_launcher_that_stands_still(start_job: StartJob, tmp_path: Path) -> None:
    """Its job runs, so none of them says that there is none: each says which process does not answer."""
    job = start_job(Plan(hold=4), 1)
    job.until_ranks_train()
    name = job_id(job)
    os.kill(job.process.pid, signal.SIGSTOP)
    try:
        for words in (["status"], ["status", name], ["stacks", name], ["bundle", name, "-o", str(tmp_path / "a.zip")]):
            done = command(job, *words)
            assert f"the launcher with pid {job.process.pid} is stopped" in done.stderr, words
            # Without a name another job, of a test beside this one, may be the one that answers.
            assert done.returncode == 5 or words == ["status"], done
        assert not (tmp_path / "a.zip").exists()
    finally:
        os.kill(job.process.pid, signal.SIGCONT)
    assert command(job, "status", name).returncode == 0
    job.go()
    assert job.finish() == 0, job.tail()


def test_an_address_for_all_without_a_token(start_job: StartJob) -> None:
    job = start_job(Plan(), 1, f"--ft-status-port={free_port()}", "--ft-status-address=0.0.0.0")
    assert job.finish() == 2
    assert "other hosts can ask there, and no token is set. Write one into a file" in job.output


def test_several_jobs(start_job: StartJob, tmp_path: Path) -> None:
    one = start_job(Plan(hold=4), 1, name="one", tmp=tmp_path / "tmp")
    flags = ("--ft-job-name=ours", "--rdzv-id=exp42", f"--log-dir={tmp_path / 'logs'}")
    two = start_job(Plan(hold=4), 2, *flags, name="two", tmp=tmp_path / "tmp")
    for job in (one, two):
        job.until(lambda job=job: job.journal("cycle_start"), "the ranks")
    done = command(one, "status")
    # There may be more: a test beside this one may run a job without a TMPDIR of its own.
    assert done.returncode == 2 and re.search(r"\d+ jobs run here\. ", done.stderr)
    assert re.fullmatch(r"worker-[0-9a-f]{6}", job_id(one)) and job_id(two) == "ours"
    assert re.search(rf"^  {job_id(one)}, for [^,]+, 1 rank here, running, run id [0-9a-f-]{{36}}$", done.stderr, re.M)
    assert re.search(r"^  ours, for [^,]+, 2 ranks here, running, run id exp42$", done.stderr, re.M)
    assert "Give the name or the run id of one, or its beginning" in done.stderr
    for meant in ("ours", "our", "exp42", "exp"):
        assert command(one, "status", meant).stdout.startswith("ours on "), meant
    assert [folder.name[:5] for folder in (tmp_path / "logs").iterdir()] == ["ours-"]
    one.go()
    assert one.finish() == two.finish() == 0, one.tail() + two.tail()
