"""accelerate's own checkpoints in memory, as docs/memory_checkpoint.md says: whatever happens to the ranks, the job
ends with the weights of a job without faults."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.training import Plan
from tests.nodes.conftest import require

WORKER = Path(__file__).with_name("accelerate_worker.py")


@pytest.fixture(autouse=True)
def _accelerate_is_installed() -> None:
    if importlib.util.find_spec("accelerate") is None:
        if sys.version_info < (3, 11):
            pytest.skip("accelerate is not among the packages for tests with this Python")
        require("accelerate is not installed: pip install accelerate")


def test_one_rank_and_then_all_are_killed(start_job: StartJob, tmp_path: Path) -> None:
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
