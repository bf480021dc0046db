"""DeepSpeed's own checkpoints in memory, as docs/memory_checkpoint.md says: whatever happens to the ranks, the job ends
with the weights of a job without faults."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.training import Plan

WORKER = Path(__file__).with_name("deepspeed_worker.py")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed",
)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_one_rank_and_then_all_are_killed(
    start_job: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero_stage: int
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("ZERO_STAGE", str(zero_stage))
    job = start_job(Plan(), 2, "--max-restarts=2", script=WORKER)
    assert job.finish(120) == 0, job.tail()
    for rank in range(2):
        assert json.loads((tmp_path / f"end-{rank}").read_text()) == {"steps": 40, "same": True}, job.tail()
    loads = job.journal("memory_loaded")
    assert [(load["cycle"], load["tier"], load["step"]) for load in loads] == [
        (0, "none", 0),
        (1, "memory", 10),
        (2, "memory", 25),
    ]
