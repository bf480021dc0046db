"""scripts/slurm/chain.sbatch: each job submits the next one when it begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.slurm.run import Run

CHAIN = "chain.sbatch"
ONE_NODE = ("--nodes=1",)


def test_the_next_job_takes_over_until_the_training_is_done(submit: Callable[..., Run], tmp_path: Path) -> None:
    again = f"--output={tmp_path}/log --open-mode=append --time=30"
    run = submit("exit:16 train finish", script=CHAIN, options=ONE_NODE, environ={"NEXT_OPTIONS": again})
    run.until(lambda: run.said("training"), "the second job trains")
    (second,) = (job for job, state in run.jobs().items() if state == "RUNNING")
    assert second != run.job and "on n2: train" in run.log  # away from the node of exit code 16
    run.slurm("scancel", "--batch", "--signal=USR1", second)
    run.ends("moved", "preempted", "done")
    assert len({line["attempt"] for line in run.history}) == 3
    assert "on n2: finish" in run.log


def test_what_another_job_would_not_mend_ends_the_chain(submit: Callable[..., Run]) -> None:
    run = submit("exit:17 finish", script=CHAIN, options=ONE_NODE)
    assert run.ends("not to be mended") == "FAILED"
