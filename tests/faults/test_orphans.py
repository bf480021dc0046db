"""Processes that ranks leave without a parent are reaped while the ranks run: by a launcher that adopts them, also as
PID 1 of a container, and inside a program that calls `launch()`, beside its own children."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import HERE, Place
from tests.faults.training import Plan
from tests.nodes.conftest import require
from tests.program import output_of, run

ORPHANS = """
import os, subprocess, time

def zombies(parent):
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = open(f"/proc/{name}/stat").read().rsplit(")", 1)[1].split()
        except OSError:
            continue
        count += fields[0] == "Z" and int(fields[1]) == parent
    return count

def leave_orphans(others=0):
    parent = os.getppid()
    for _ in range(20):
        subprocess.run(["sh", "-c", "true & exit 0"], check=True)
    # A daemon: in a session of its own.
    subprocess.run(["sh", "-c", "setsid true & exit 0"], check=True)
    deadline = time.monotonic() + 60
    count = zombies(parent)
    while count != others and time.monotonic() < deadline:
        time.sleep(0.05)
        count = zombies(parent)
    # Not counted once more: the other rank may end meanwhile, and is a zombie until the launcher takes its exit code.
    return count
"""
SCRIPT = (
    ORPHANS
    + """
print(f"zombies left: {leave_orphans()}" + os.linesep, end="", flush=True)  # one write: two ranks print
"""
)
PROGRAM = (
    ORPHANS.replace("setsid true", "true")
    + """
from ft_launcher import LaunchConfig, launch

if __name__ == "__main__":
    own = subprocess.Popen(["sh", "-c", "exit 3"])
    daemon = subprocess.Popen(["sh", "-c", "exit 4"], start_new_session=True)
    left = launch(leave_orphans, LaunchConfig(nproc_per_node=2))(2)
    print(sorted(left.values()), own.wait(), daemon.wait())
"""
)
AS_PID_1 = ("unshare", "--pid", "--fork", "--mount-proc")


def start_as_pid_1(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*AS_PID_1, *words], **more)


@pytest.fixture
def _unshares() -> None:
    if run([*AS_PID_1, "true"]).returncode:
        require("this user may not make a namespace of pids")


@pytest.mark.usefixtures("_unshares")
@pytest.mark.parametrize("place", [HERE, Place(start=start_as_pid_1)], ids=["a process", "PID 1"])
def test_while_ranks_run(start_job: StartJob, tmp_path: Path, place: Place) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    job = start_job(Plan(), 2, script=script, place=place)
    assert job.finish(90) == 0, job.tail()
    assert job.output.count("zombies left: 0") == 2, job.tail()


@pytest.mark.usefixtures("_unshares")
def test_beside_the_children_of_a_program(tmp_path: Path) -> None:
    """Which is PID 1, so that it gets the orphans: its own children's codes stay for it."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert output_of([*AS_PID_1, sys.executable, str(program)], tmp_path).split("\n")[-2] == "[2, 2] 3 4"
