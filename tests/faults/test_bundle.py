"""A bundle of a real job that hangs, while it runs and of its journal, with secrets wherever a user can put them."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.faults.conftest import StartJob
from tests.faults.job import Job, Place
from tests.faults.training import Plan, PlannedFault
from tests.program import ROOT, clean_environment, run

SECRET = "hunter2"
ENVIRONMENT = {
    "WANDB_API_KEY": SECRET,
    "DATABASE_URL": f"postgres://user:{SECRET}@db/x",
    "NCCL_IB_HCA": f"https://user:{SECRET}@proxy",
    "NCCL_DEBUG": "VERSION",
}


def bundle(job: Job, of: str | Path, file: Path) -> dict[str, str]:
    environment = clean_environment(TMPDIR=str(job.tmp))
    words = [sys.executable, "-m", "ft_launcher", "bundle", str(of), "-o", str(file)]
    done: subprocess.CompletedProcess[str] = run(words, folder=ROOT, environ=environment, limit_s=60)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(file) as archive:
        found = {name: archive.read(name).decode() for name in archive.namelist()}
    for name, text in found.items():
        assert SECRET not in text, f"{name}: {text}"
    return found


def test_a_job_while_it_runs_and_its_journal(start_job: StartJob, tmp_path: Path) -> None:
    place = Place(environ=ENVIRONMENT)
    plan = Plan((PlannedFault("exception", iteration=2, rank=1),), hold=4)
    job = start_job(plan, 2, "--max-restarts=2", f"--ft-node-check=test -n {SECRET}", place=place)
    job.until_ranks_train(cycle=1)
    run_id = str(job.journal("job_start")[0]["run_id"])
    live = bundle(job, run_id[:8], tmp_path / "live.zip")
    assert live.keys() == {"incident.md", "stacks.txt", "status.json", "journals/0.jsonl"}
    status = json.loads(live["status.json"])
    assert (status["run_id"], status["fault_count"]) == (run_id, 1)
    assert "Now:\n  rank " in live["stacks.txt"]
    page = live["incident.md"]
    assert f"# Incident: {run_id}" in page and "| restart: restart 1 of 2 |" in page, page
    assert "NCCL_DEBUG=VERSION" in page and "torch=" in page, page
    job.go()
    assert job.finish() == 0
    after = bundle(job, job.journal_folder, tmp_path / "after.zip")
    assert after.keys() == {"incident.md", "journals/0.jsonl"}
    assert "| exit code | 0 on " in after["incident.md"]
