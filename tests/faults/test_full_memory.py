"""A folder for a user's own files in a small tmpfs: neither a rank that is killed in the block nor a state that is too
large makes the next cycle fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import own_shm
from tests.faults.conftest import StartJob
from tests.faults.job import Job, Place
from tests.faults.training import Plan
from tests.nodes.conftest import require

KILLED = """
import os, signal
import ft_client as ft

cycle = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
latest = ft.latest_memory_folder()
start = 0
if latest is not None:
    start = int((latest / "step").read_text())
print("cycle", cycle, "goes on from", start, flush=True)
for step in range(start + 1, 5):
    with ft.memory_folder(step) as folder:
        (folder / "step").write_text(str(step))
        (folder / "state").write_bytes(bytes(20 << 20))
        if step == cycle + 2 and cycle < 3:
            os.kill(os.getpid(), signal.SIGKILL)
"""
TOO_LARGE = """
import os
import ft_client as ft

for step in (1, 2, 3):
    if ft.memory_folder.is_on():
        with ft.memory_folder(step) as folder:
            (folder / "state").write_bytes(bytes(80 << 20))
    held = sum(os.stat(os.path.join(top, name)).st_blocks for top, _, names in os.walk("/dev/shm") for name in names)
    print("after", step, "less than a MiB is held:", held * 512 < 1 << 20, flush=True)
"""


@pytest.fixture(autouse=True)
def _unshares() -> None:
    require(own_shm.why_not())


def ended(start_job: StartJob, tmp_path: Path, text: str, restarts: int) -> Job:
    """A job of one rank that has succeeded."""
    script = tmp_path / "script.py"
    script.write_text(text)
    flags = (f"--max-restarts={restarts}", "--ft-memory-limit=64MiB")
    job = start_job(Plan(), 1, *flags, script=script, place=Place(start=own_shm.start_with_own_shm))
    assert job.finish() == 0, job.tail()
    return job


def test_a_rank_that_is_killed_in_the_block_again_and_again(start_job: StartJob, tmp_path: Path) -> None:
    """There is room for two folders and the one that is being written, and not for one that came to nothing."""
    job = ended(start_job, tmp_path, KILLED, restarts=3)
    for cycle in range(4):
        assert f"cycle {cycle} goes on from {cycle}" in job.output, job.tail()


def test_a_state_that_is_too_large_costs_one_restart(start_job: StartJob, tmp_path: Path) -> None:
    job = ended(start_job, tmp_path, TOO_LARGE, restarts=1)
    assert job.output.count("no folders are kept in memory: rank 0: 60.") == 1, job.tail()
    for step in (1, 2, 3):
        assert f"after {step} less than a MiB is held: True" in job.output
