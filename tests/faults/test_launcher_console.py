"""A console that nobody reads, or that is none, and errors in what the launcher says: restart and SIGTERM go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rank_monitor.contract.exit_codes import ExitCode
from tests.faults.conftest import StartJob
from tests.faults.invariants import Told, holds, modes, nothing_left
from tests.faults.job import Place
from tests.faults.training import Plan, PlannedFault

HOLD = 8
CLOSED = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
FAILING_REPORTS = """
import sys
from ft_launcher import cli, composition
from ft_launcher.agent import fault_finding
from ft_launcher.decide.attribution import first_failure
from ft_launcher.record import recorder
from ft_launcher.record.console import console_text

def fails(*args, **kwargs):
    raise RecursionError("what a rank wrote \\x1b[2J")

def without_exceptions(evidence, attribute=first_failure.attribute):
    if any(rank.exception for rank in evidence.ranks):
        fails()
    return attribute(evidence)

first_failure.attribute = without_exceptions
console_text.block = fault_finding.iteration_reached = fails
recorder.events.FaultEvent.of = recorder.events.DecisionEvent.of = fails
cli.program()
"""


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The writing end of a pipe that is full, and that nobody reads."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x")
    except BlockingIOError:
        pass
    os.set_blocking(writer, True)
    yield writer
    os.close(writer)
    os.close(reader)


@pytest.mark.parametrize("flags", [("--redirects=3", "--tee=3"), ("--ft-watch-log=nanogpt",)], ids=["tee", "read"])
def test_a_console_that_nobody_reads(
    start_job: StartJob, tmp_path: Path, full_pipe: int, flags: tuple[str, ...]
) -> None:
    """Neither the block of a fault nor 8 MiB that a rank prints holds up the restart, nor then the end."""

    def start(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(words, **(more | {"stdout": full_pipe, "stderr": full_pipe}))

    faults = (PlannedFault("prints 8 MiB", iteration=2, rank=1), PlannedFault("exception", iteration=4, rank=0))
    flags = ("--max-restarts=1", "--log-dir=logs", *flags)
    job = start_job(Plan(faults, saves_on_sigterm=True, hold=HOLD), 2, *flags, place=Place(start))
    job.until_ranks_train(HOLD, cycle=1)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == ExitCode.PREEMPTED, job.tail()
    nothing_left(job)
    assert modes(job.journal_folder, tmp_path / "logs") == {0o600, 0o700}
    (end,) = job.journal("job_end")
    assert end["exit_code"] == ExitCode.PREEMPTED
    assert [fault["kind"] for fault in job.journal("fault")] == ["exception"], job.tail()


@pytest.mark.parametrize("flags", [(), ("--ft-watch-log=nanogpt",)], ids=["inherited", "read"])
def test_descriptors_0_to_2_are_closed(start_job: StartJob, flags: tuple[str, ...]) -> None:
    def start(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*CLOSED, *words], **more)

    job = start_job(Plan((PlannedFault("exception", rank=1),)), 2, "--max-restarts=1", *flags, place=Place(start))
    holds(job, 0, [Told("exception", {1})])


def test_errors_in_what_describes_a_fault(start_job: StartJob, tmp_path: Path) -> None:
    """The fault is decided with what is known, each part that fails is one line, and SIGTERM ends the job."""
    program = tmp_path / "failing_reports.py"
    program.write_text(FAILING_REPORTS)

    def start(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
        assert words[1:3] == ["-m", "ft_launcher"]
        return subprocess.Popen([sys.executable, str(program), "--ft-warm-start=off", *words[3:]], **more)

    plan = Plan((PlannedFault("exception", rank=1),), saves_on_sigterm=True, hold=HOLD)
    job = start_job(plan, 2, "--max-restarts=1", place=Place(start))
    job.until_ranks_train(HOLD, cycle=1)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == ExitCode.PREEMPTED, job.tail()
    nothing_left(job)
    for part in ("what the ranks wrote", "how far the cycle came", "the fault", "the decision", "the block"):
        assert f"WARNING: {part} " in job.output, f"{part}\n{job.tail()}"
    assert "\x1b" not in job.output
