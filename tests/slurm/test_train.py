"""scripts/slurm/train.sbatch on a real Slurm of two nodes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.run import Run

Submit = Callable[..., Run]
ONE_NODE = ("--nodes=1",)


def test_it_finishes_at_the_first_try(submit: Submit) -> None:
    run = submit("finish")
    assert run.ends("done") == "COMPLETED"
    assert run.history[0]["nodes"] == {"n1": 0, "n2": 0}
    assert "start rank 0 of 2 on n1" in run.log and "start rank 1 of 2 on n2" in run.log


def both_train(run: Run) -> bool:
    """In the last attempt: the hang's other rank has trained, too."""
    last = run.log.rpartition("attempt on ")[2]
    return "on n1: train" in last and len(re.findall(r"^training$", last, re.MULTILINE)) == 2


def test_a_crash_a_hang_and_the_time_limit_are_three_more_attempts(submit: Submit) -> None:
    run = submit("crash hang train finish", "--ft-rank-heartbeat-timeout=2")
    run.until(lambda: both_train(run), "the third attempt trains")
    run.slurm("scancel", "--batch", "--signal=USR1", run.job)
    assert run.ends("failed", "failed", "preempted", "done") == "COMPLETED"
    assert [line["nodes"]["n1"] for line in run.history] == [1, 85, 86, 0]
    assert run.history[2]["nodes"] == {"n1": 86, "n2": 86}
    steps = re.findall(r"^saved step (\d+)", run.log.partition("told to end")[2], re.MULTILINE)
    assert len(steps) == 2 and all(f"finish, step {step}\n" in run.log for step in steps)


@pytest.mark.parametrize(
    ("words", "flags", "code"),
    [
        ("exit:3", ["--ft-no-restart-exit-codes=3"], 93),
        ("exit:17", ["--max-restarts=3"], 17),
        ("finish", ["--no-such-flag"], 2),
    ],
)
def test_what_another_job_would_not_mend_stops_the_run(submit: Submit, words: str, flags: list[str], code: int) -> None:
    run = submit(words, *flags, options=ONE_NODE)
    assert run.ends("not to be mended") == "FAILED"
    assert f"stop: exit code {code}: " in run.log
    assert f" ExitCode={code}:0 " in run.shown(run.job)


def test_so_many_failures_in_a_row_end_the_run(submit: Submit) -> None:
    run = submit("crash crash finish", options=ONE_NODE, environ={"MAX_FAILURES": "2"})
    assert run.ends("failed", "failed") == "FAILED"
    assert "failure 2 in a row, the limit is 2" in run.log


def test_an_unhealthy_node_is_left_out(submit: Submit) -> None:
    run = submit("finish", "--ft-node-check=echo no good; test $SLURMD_NODENAME != n1", options=ONE_NODE)
    assert run.ends("failed", "done") == "COMPLETED"
    assert run.history[0]["nodes"] == {"n1": 83} and run.history[0]["exclude"] == ["n1"]
    assert "on n2: finish" in run.log and "on n1:" not in run.log


def test_a_limit_that_is_no_number_is_said_at_once(submit: Submit) -> None:
    run = submit("finish", options=ONE_NODE, environ={"MAX_FAILURES": "many"})
    assert run.ends() == "FAILED"
    assert "MAX_FAILURES=many: a whole number above 0 is needed" in run.log and run.said("start") == 0


@pytest.mark.slow
def test_a_launcher_that_is_killed_ends_the_attempt_on_the_other_node_too(submit: Submit) -> None:
    run = submit("train finish", environ={"JOIN_TIMEOUT": "10"})
    run.until(lambda: run.said("training") == 2, "it trains")
    commands = {pid: words for pid, words in run.left().items() if "ft_launcher" in words}
    (second,) = (pid for pid in commands if b"SLURM_NODEID=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    os.kill(second, signal.SIGKILL)
    assert run.ends("failed", "done") == "COMPLETED"
    assert run.history[0]["nodes"] == {"n1": 84, "n2": None} and run.history[0]["code"] == 137


@pytest.mark.slow
def test_ends_without_the_flag_are_no_failures_and_end_the_row_of_them(submit: Submit) -> None:
    run = submit("crash over crash crash", options=ONE_NODE, environ={"MAX_FAILURES": "2", "FLAG_REQUIRED": "1"})
    assert run.ends("failed", "unfinished", "failed", "failed") == "FAILED"


@pytest.mark.slow
def test_a_result_in_doubt_moves_to_another_node_and_is_no_failure(submit: Submit) -> None:
    run = submit("exit:16 finish", "--max-restarts=3", options=ONE_NODE, environ={"MAX_FAILURES": "1"})
    assert run.ends("moved", "done") == "COMPLETED"
    assert "on n1: exit:16" in run.log and "on n2: finish" in run.log


def test_a_requeue_by_somebody_else_is_left_to_slurm(submit: Submit) -> None:
    run = submit("train finish")
    run.until(lambda: run.said("training") == 2, "it trains")
    run.slurm("scancel", "--batch", "--signal=USR1", run.job)
    run.slurm("scontrol", "requeue", run.job)
    assert run.ends("ended by Slurm", "done") == "COMPLETED"
    assert " Restarts=1 " in run.shown(run.job) and run.said("saved") == 2


def test_a_cancelled_run_stays_cancelled(submit: Submit) -> None:
    run = submit("train finish", options=ONE_NODE)
    run.until(lambda: run.said("training") == 1, "it trains")
    run.slurm("scancel", run.job)
    assert run.ends("ended by Slurm") == "CANCELLED"
    assert run.said("saved") == 1


def test_a_run_that_is_done_does_nothing(submit: Submit) -> None:
    run = submit("crash", options=ONE_NODE, environ={"FAULT_TOL_FINISHED_FLAG_FILE": "/dev/null"})
    assert run.ends() == "COMPLETED"
    assert "done before" in run.log and run.said("start") == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("before", ["--signal=B:USR1@40", "--signal=B:CONT@40"])
def test_the_time_limit_itself(submit: Submit, before: str) -> None:
    """With the signal before it, and, as CONT does nothing, with Slurm's SIGTERM only."""
    run = submit("train finish", options=(*ONE_NODE, "--time=1", before))
    run.until(lambda: run.outcomes[-1:] == ["done"], "the time limit, and the end", 240.0)
    # Slurm may send the signal up to a minute early (sbatch(1)): then an attempt ends before its training has begun.
    *before_it, _ = run.outcomes
    assert before_it
    assert run.ends(*["preempted" for _ in before_it], "done") == "COMPLETED"
    assert run.said("saved") == 1
