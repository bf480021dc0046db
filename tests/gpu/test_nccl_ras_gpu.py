"""NCCL's own RAS, asked at a hang of a job that uses it: with one GPU a communicator of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ft_launcher.decide.attribution.ras_answer import view_in
from tests.faults.conftest import StartJob
from tests.faults.training import Plan

pytestmark = pytest.mark.gpu

RANK = Path(__file__).with_name("nccl_rank.py")
HAS_RAS = (2, 24)
"""The first release of NCCL that has it."""


def test_the_launcher_and_its_reader_understand_what_nccl_answers(
    start_job: StartJob, tmp_path: Path, gpus: int
) -> None:
    if not torch.distributed.is_nccl_available() or torch.cuda.nccl.version()[:2] < HAS_RAS:
        pytest.skip("needs NCCL 2.24 or later")
    ranks = min(2, gpus)
    limits = ("--ft-rank-section-timeouts=step:5", "--max-restarts=0")
    job = start_job(Plan(), ranks, *limits, script=RANK)
    assert job.finish(300) != 0, job.tail()
    for name in ("json", "text"):
        answer = (tmp_path / f"answer.{name}").read_bytes()
        print(f"NCCL {torch.cuda.nccl.version()}, {name}:\n{answer.decode(errors='replace')}")
        view = view_in(answer)
        assert (view.processes, view.missing_count) == (ranks, 0)
    (evidence,) = job.journal("evidence")
    print(f"in the journal: {evidence['nccl']}")
    assert evidence["nccl"] is not None, job.tail()
    assert (evidence["nccl"]["processes"], evidence["nccl"]["missing_count"]) == (ranks, 0)
