"""The files per cycle of NVIDIA's launcher, of jobs with a restart: one application log of all ranks, one record."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left
from tests.faults.job import Job, Place
from tests.faults.training import Plan
from tests.ports import free_port

LONG = 20_000
SCRIPT = f"""
import json, os, pathlib, sys, time
rank, cycle = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"cycle {{cycle}}", "x" * {LONG})
print("error text", file=sys.stderr)
for _ in range(600):  # the launcher writes it while the ranks start
    try:
        print("record", json.load(open(os.environ["NVRX_CURRENT_CYCLE_INFO"]))["cycle_number"])
        break
    except OSError:
        time.sleep(0.1)
print("no end", end="", flush=True)
done = pathlib.Path(f"done-{{cycle}}")
done.mkdir(exist_ok=True)
(done / rank).touch()
while len(list(done.iterdir())) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
sys.exit(3 if cycle == "0" and rank == "1" else 0)
"""


def record(folder: Path, cycle: int) -> dict[str, Any]:
    return json.loads((folder / f"cycle_info.77.1.{cycle}").read_text())  # type: ignore[no-any-return]


def lines(folder: Path, cycle: int) -> list[str]:
    return (folder / f"job_cycle{cycle}.log").read_text().splitlines()


@pytest.mark.parametrize("nodes", [1, 2])
def test_files_of_a_job_with_a_restart(start_job: StartJob, tmp_path: Path, nodes: int) -> None:
    script, port, folder = tmp_path / "prints.py", free_port(), tmp_path / "nvrx"
    script.write_text(SCRIPT)
    flags = ["--max-restarts=1", f"--ft-cycle-info-dir={folder}", f"--ft-per-cycle-applog-prefix={folder}/job.log"]
    flags += [f"--nnodes={nodes}", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=one"]
    # as NVIDIA's own batch script: no backend is named
    flags += ["--ft-alias-nvrx", "--rdzv-conf=join_timeout=60,last_call_timeout=1"] if nodes > 1 else []
    environ = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"}
    jobs = [
        start_job(Plan(), 2, *flags, name=f"node{node}", script=script, place=Place(environ=environ))
        for node in range(nodes)
    ]
    for job in jobs:
        assert job.finish(120) == 0, job.tail()
    for job in jobs:
        job.port = port if nodes > 1 else 0
        nothing_left(job)
        assert "Ranks start by exec" not in job.output, (
            "the new variable must not force an exec start: no import of torch reads it"
        )
        assert "error text" not in job.output, "the log of the cycle has it, and not the console"
    each = [f"{rank}: {text}" for rank in range(2 * nodes) for text in ("error text", "no end", "record {}")]
    for cycle in (0, 1):
        found = [line if len(line) < LONG else line[:10] for line in lines(folder, cycle)]
        whole = [line.format(cycle) for line in each] + [f"{rank}: cycle {cycle}" for rank in range(2 * nodes)]
        assert sorted(found) == sorted(whole)
        made = record(folder, cycle)
        assert made["cycle_end_time"] >= made["cycle_start_time"] != "", made
        assert made["cycle_log_file"] == str(folder / f"job_cycle{cycle}.log")
        names = [socket.gethostname()] * nodes
        assert made["active_ranks"] == ("0" if nodes == 1 else "0-1") and made["standby_nodes"] == ""
        assert names[0].partition(".")[0].rstrip("0123456789") in made["active_nodes"] != ""
    assert (folder / "cycle_info.77.current").readlink() == Path("cycle_info.77.1.1")


def test_a_folder_that_cannot_be_written_ends_nothing(start_job: StartJob, tmp_path: Path) -> None:
    script = tmp_path / "prints.py"
    script.write_text("print('it ran')")
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "below"
    flags = (f"--ft-cycle-info-dir={below}", f"--ft-per-cycle-applog-prefix={below}/job.log", "--log-dir=logs")
    job: Job = start_job(Plan(), 1, *flags, script=script)
    assert job.finish(60) == 0, job.tail()
    assert "the file of the cycle cannot be written" in job.output
    assert "the log of the cycle cannot be written" in job.output
    (written,) = tmp_path.glob("logs/*/cycle_0/0/stdout.log")
    assert written.read_text() == "it ran\n"
