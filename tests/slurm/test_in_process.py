"""scripts/slurm/in_process.sbatch: ranks under plain srun, without a launcher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ft_client.inprocess.wait_daemon import PROCESS_NAME
from tests.slurm.run import Run

RANK = Path(__file__).with_name("in_process_rank.py")


def test_the_others_go_on_without_a_killed_rank(submit: Callable[..., Run]) -> None:
    """Rank 0, whose standalone agent hosts the store: the job ends after that agent."""
    run = submit("0", script="in_process.sbatch", rank=RANK, options=("--ntasks-per-node=2",))
    run.until(lambda: not run.jobs(), "the end of its job")
    assert not [pid for pid in run.left() if Path(f"/proc/{pid}/comm").read_text() == f"{PROCESS_NAME}\n"]
    assert run.ends("done") == "COMPLETED"
    assert run.history[0]["code"] == 137
    assert "iteration 0 rank 3 of 4 on n2" in run.log
    assert all(f"iteration 1 rank {rank} of 3 on n" in run.log for rank in range(3))


@pytest.mark.slow
def test_the_job_is_requeued_when_no_rank_is_left(submit: Callable[..., Run]) -> None:
    run = submit("all 3", script="in_process.sbatch", rank=RANK, options=("--ntasks-per-node=2",))
    assert run.ends("failed", "done") == "COMPLETED"
    assert "iteration 1 rank 2 of 3 on n2" in run.log
