"""The launcher is told to end, or is killed, at every moment of its life: its code says how, and nothing is left."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import holds, nothing_left, result_is_fault_free
from tests.faults.job import Job, Place
from tests.faults.training import Plan
from tests.ports import free_port

HOLD = 4
ENDS_S = 20.0


def starts(job: Job) -> None:
    """The launcher has begun, and imports torch; its template is there."""
    job.until(job.template, "the template")


def rendezvous(job: Job) -> None:
    """The first rendezvous waits for a node that never comes."""
    job.until(lambda: listens(job.port), "the rendezvous' port")
    job.until(lambda: job.journal("job_start"), "the journal")


def trains(job: Job) -> None:
    """The ranks train."""
    job.until_ranks_train(HOLD)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def begin(start_job: StartJob, moment: Callable[[Job], None], plan: Plan, *flags: str) -> Job:
    """A job that has come to `moment`."""
    port = free_port()
    if moment is rendezvous:
        flags = (*flags, "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=alone")
    job = start_job(plan, 2, *flags)
    job.port = port
    moment(job)
    return job


@pytest.mark.parametrize(
    ("number", "moment", "code"),
    [
        (signal.SIGTERM, starts, 143),
        (signal.SIGTERM, rendezvous, 143),
        (signal.SIGTERM, trains, 86),
        (signal.SIGINT, starts, 130),
        (signal.SIGINT, rendezvous, 130),
        (signal.SIGINT, trains, 130),
        (signal.SIGHUP, trains, 86),
        (signal.SIGUSR1, trains, 86),
        (signal.SIGUSR2, trains, 86),
        (signal.SIGKILL, starts, 137),
        (signal.SIGKILL, rendezvous, 137),
        (signal.SIGKILL, trains, 137),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else getattr(value, "__name__", None),
)
def test_told_to_end(start_job: StartJob, number: signal.Signals, moment: Callable[[Job], None], code: int) -> None:
    job = begin(start_job, moment, Plan(hold=HOLD))
    job.process.send_signal(number)
    assert job.finish(ENDS_S) == code, job.tail()
    nothing_left(job)
    if moment is not starts and number != signal.SIGKILL:
        assert [line["exit_code"] for line in job.journal("job_end")] == [code], job.tail()
    assert moment is trains or "Traceback" not in job.output, job.tail()
    assert "error of the launcher" not in job.output, job.tail()


def test_told_to_end_in_a_batch_script_for_nvidias_launcher(start_job: StartJob) -> None:
    """As NeMo-Run's: it exports the name of a file that nothing writes, and takes every code but 0 for a failure."""
    place = Place(environ={"FT_ALIAS_NVRX": "1", "FAULT_TOL_CFG_PATH": "/nowhere/job_ft_cfg.yml", "FT_BIN": "/opt"})
    job = start_job(Plan(hold=HOLD), 1, place=place)
    trains(job)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(ENDS_S) == 0, job.tail()
    assert job.output.count("there is no such file: /nowhere/job_ft_cfg.yml, named by FAULT_TOL_CFG_PATH") == 1
    assert "FT_BIN" not in job.output, job.tail()
    assert [line["exit_code"] for line in job.journal("job_end")] == [86], "what the batch scripts of ours read"


def test_three_times_in_a_row_while_ranks_go_on(start_job: StartJob) -> None:
    """The second signal shortens the grace; none breaks the stop."""
    flags = ("--ft-preemption-grace=600", "--workers-stop-timeout=1")
    job = begin(start_job, trains, Plan(hold=HOLD, stubborn_ranks=(0, 1)), *flags)
    job.process.send_signal(signal.SIGTERM)
    job.until((job.folder / "sigterm-0").exists, "the ranks got it")
    job.process.send_signal(signal.SIGTERM)
    job.until(lambda: "got another signal, SIGTERM; the ranks have" in job.output, "the grace is shortened")
    job.process.send_signal(signal.SIGTERM)
    holds(job, 87, limit_s=ENDS_S)


def test_preempted_ranks_save_and_the_next_run_resumes(start_job: StartJob) -> None:
    job = begin(start_job, trains, Plan(hold=HOLD, saves_on_sigterm=True))
    job.process.send_signal(signal.SIGTERM)
    holds(job, 86, limit_s=ENDS_S)
    saved = [job.state(rank) for rank in range(2)]
    assert [state.iteration for state in saved if state] == [HOLD, HOLD], job.tail()
    told = [len((job.folder / f"sigterm-{rank}").read_text().split()) for rank in range(2)]
    assert told == [1, 1], f"the ranks get the signal once\n{job.tail()}"
    job.go()
    again = start_job(Plan(), 2, name="again")
    holds(again, 0)
    result_is_fault_free(again, 2)


def test_ranks_that_outlive_the_grace_are_killed(start_job: StartJob) -> None:
    job = begin(start_job, trains, Plan(hold=HOLD, stubborn_ranks=(0, 1)), "--ft-preemption-grace=1")
    job.process.send_signal(signal.SIGTERM)
    holds(job, 87, limit_s=ENDS_S)


IGNORES = """
import pathlib, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
(pathlib.Path(sys.argv[1]) / "runs").touch()
time.sleep(3600)
"""
TOLD = (
    "got SIGINT; the ranks are told to end",
    "got another signal, SIGINT; the ranks have 3 s more",
    "got SIGINT for the third time; the ranks are killed",
)


@pytest.mark.parametrize("presses", [2, 3])
def test_the_second_interrupt_shortens_the_wait_and_the_third_kills(
    start_job: StartJob, tmp_path: Path, presses: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(IGNORES)
    job = start_job(Plan(), 1, "--workers-stop-timeout=600", script=script)
    job.until((tmp_path / "runs").exists, "the rank")
    for told in TOLD[:presses]:
        job.process.send_signal(signal.SIGINT)
        job.until(lambda told=told: told in job.output, told)  # type: ignore[misc]
    assert job.finish(ENDS_S) == 130, job.tail()
    assert [told in job.output for told in TOLD] == [True, True, presses == 3], job.tail()
    assert len(job.journal("killed")) == 1, job.tail()
