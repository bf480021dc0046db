"""A job whose storage for `--ft-memory-flush` stops answering before it is told to end: the end comes all the same."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import test_stalled_disk
from tests.faults.test_stalled_disk import SERVED, StalledJob
from tests.patience import patient

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or not Path("/dev/fuse").exists(),
    reason="needs root, unshare and /dev/fuse",
)
SCRIPT = """
import sys, time
import torch
import ft_client as ft
from ft_client.memory.background_work import BACKGROUND

keep = ft.MemoryCheckpoint(model=torch.nn.Linear(2, 2))
keep.load()
keep.step(1)
BACKGROUND.wait()
open(f"{sys.argv[1]}/began0", "w").close()
time.sleep(600)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StalledJob]:
    monkeypatch.setattr(test_stalled_disk, "SCRIPT", SCRIPT)
    flags = ("--nproc-per-node=1", "--ft-memory-flush={disk}", "--ft-preemption-grace=6")
    started = StalledJob(tmp_path, *flags)
    yield started
    started.close()


def test_the_grace_bounds_the_end(job: StalledJob) -> None:
    job.begin(SERVED)
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(patient(60)) in (86, 87), job.out
    assert "no state is written to --ft-memory-flush: the time was over, with nothing done" in job.out
