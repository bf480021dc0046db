"""When a job restarts and when it gives up, by real processes: progress, errors in a row, waits, requests of a rank."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import GIVE_UP, Told, holds, journal_tells, nothing_left
from tests.faults.job import Job, kill
from tests.faults.training import Plan, PlannedFault

NPROC = 2
LAST = NPROC - 1
WAITS = "--ft-backoff=0.1:600"  # however slow the machine is, each cycle here is a young one


def faults(*whats: str, iteration: int = 4) -> Plan:
    """One after the other, a cycle each, all in the same place."""
    return Plan(tuple(PlannedFault(what, "step", iteration, LAST) for what in whats))


def story(kind: str, restarts: int, gives_up: bool = True) -> list[Told]:
    return [Told(kind, {LAST})] * restarts + [Told(kind, {LAST}, action=GIVE_UP)] * gives_up


def decisions(job: Job) -> list[dict[str, Any]]:
    return job.journal("decision")


# Progress and errors in a row.


def test_the_same_error_three_times_ends_the_job(start_job: StartJob) -> None:
    job = start_job(faults(*["exception"] * 3), NPROC, "--max-restarts=10")
    holds(job, 93, story("exception", 2))
    assert "the same error 3 times in a row: tests.faults.injected.InjectedError at" in decisions(job)[-1]["reason"]
    assert "at iteration 4" in job.journal("job_end")[0]["reason"]


def test_no_progress_ends_the_job(start_job: StartJob) -> None:
    job = start_job(faults("SIGKILL", "exit 3", "SIGKILL"), NPROC, "--max-restarts=10", "--ft-max-no-progress-cycles=2")
    holds(job, 93, [Told("signal", {LAST}), Told("exit", {LAST}), Told("signal", {LAST}, action=GIVE_UP)])
    assert "no progress in 2 cycles in a row" in decisions(job)[-1]["reason"]
    assert [line["iteration"] for line in job.journal("cycle_end")] == [4, 4, 4]


def test_the_limits_can_be_switched_off(start_job: StartJob) -> None:
    off = ("--ft-same-error-limit=0", "--ft-max-no-progress-cycles=0")
    holds(start_job(faults(*["exception"] * 4), NPROC, "--max-restarts=4", *off), 0, story("exception", 4, False))


def test_progress_gives_the_budget_back(start_job: StartJob) -> None:
    plan = Plan(tuple(PlannedFault("SIGKILL", "step", iteration, LAST) for iteration in (4, 6, 8, 10)))
    job = start_job(plan, NPROC, "--max-restarts=1")
    holds(job, 0, story("signal", 4, False))
    assert [decision["reason"] for decision in decisions(job)] == ["restart 1 of 1"] * 4
    whole = "the budget is whole again once the training is beyond iteration"
    first, second, *_ = (decision["budget"] for decision in decisions(job))
    assert first == f"{whole} 4" and second.startswith("the progress to iteration 6 gave back what was spent, and ")
    assert f"next: restart - restart 1 of 1, 0 left; {whole} 4\n" in job.output


def test_less_than_the_least_progress_gives_nothing_back(start_job: StartJob) -> None:
    plan = Plan(tuple(PlannedFault("SIGKILL", "step", iteration, LAST) for iteration in (4, 6, 7)))
    job = start_job(plan, NPROC, "--max-restarts=2", "--ft-min-progress-iterations=4")
    holds(job, 137, story("signal", 2))


def script(folder: Path, text: str) -> Path:
    file = folder / "silent.py"
    file.write_text("import sys\nfrom pathlib import Path\nfolder = Path(sys.argv[1])\n" + text)
    return file


def test_torchruns_meaning_for_a_job_that_reports_nothing(start_job: StartJob, tmp_path: Path) -> None:
    silent = script(tmp_path, "import os\nraise ValueError(f'always another text: {os.getpid()}')\n")
    job = start_job(Plan(), 1, "--max-restarts=4", script=silent)
    holds(job, 1, [*[Told("exception", {0})] * 4, Told("exception", {0}, action=GIVE_UP)])
    assert "all 4 restarts spent" in decisions(job)[-1]["reason"]


GROUP = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
REFUSED = "import argparse\nargparse.ArgumentParser().parse_args(['--no-such-option'])\n"


@pytest.mark.parametrize(
    ("text", "restarts", "reason"),
    [
        ("x = (\n", 1, "each within 60 s and before any process group: SyntaxError at"),
        ("import no_such_module\n", 1, "each within 60 s and before any process group: ModuleNotFoundError at"),
        (REFUSED, 1, "each within 60 s and before any process group: argparse.ArgumentError"),
        ("raise ValueError('always')\n", 1, "each within 60 s and before any process group: ValueError at"),
        (GROUP + "raise ValueError('always')\n", 2, "3 times in a row, each within 10 minutes: ValueError at"),
        (
            GROUP + "dist.destroy_process_group()\nraise ValueError('always')\n",
            2,
            "3 times in a row, each within 10 minutes: ValueError at",
        ),
    ],
    ids=["syntax", "import", "arguments", "before a group", "in a group", "after a group"],
)
def test_an_error_that_no_restart_mends(
    start_job: StartJob, tmp_path: Path, text: str, restarts: int, reason: str
) -> None:
    job = start_job(Plan(), 1, "--max-restarts=6", script=script(tmp_path, text))
    holds(job, 93, [*[Told("exception", {0})] * restarts, Told("exception", {0}, action=GIVE_UP)])
    assert reason in decisions(job)[-1]["reason"], decisions(job)


@pytest.mark.parametrize(
    "text",
    [
        "raise OSError('the storage is slow')\n",
        "open('/no/such/folder/file')\n",
        "raise MemoryError('always')\n",
        "raise ConnectionError('always')\n",
    ],
)
def test_an_error_that_may_pass_has_torchruns_restarts(start_job: StartJob, tmp_path: Path, text: str) -> None:
    job = start_job(Plan(), 1, "--max-restarts=3", script=script(tmp_path, text))
    holds(job, 1, [*[Told("exception", {0})] * 3, Told("exception", {0}, action=GIVE_UP)])
    assert "all 3 restarts spent" in decisions(job)[-1]["reason"]


def test_progress_by_the_file_of_the_checkpoint(start_job: StartJob, tmp_path: Path) -> None:
    """It saves at 10, 20 and 30, and then no more; the first cycle has nothing to show."""
    saves = (
        "file = folder / 'saved'\nlast = int(file.read_text()) if file.exists() else 0\ncycles = folder / 'cycles'\n"
    )
    saves += "with cycles.open('a') as done:\n    done.write('x')\n"
    saves += "if len(cycles.read_text()) > 1:\n    file.write_text(str(min(30, last + 10)))\nsys.exit(3)\n"
    flags = (
        "--max-restarts=1",
        f"--ft-checkpoint-iteration-file={tmp_path / 'saved'}",
        "--ft-max-no-progress-cycles=1",
    )
    job = start_job(Plan(), 1, *flags, script=script(tmp_path, saves))
    holds(job, 93, [*[Told("exit", {0})] * 4, Told("exit", {0}, action=GIVE_UP)])
    assert [line["iteration"] for line in job.journal("cycle_end")] == [None, 10, 20, 30, 30]


# Waits.


def test_waits_double_while_cycles_die_young(start_job: StartJob) -> None:
    job = start_job(faults(*["SIGKILL"] * 3), NPROC, "--max-restarts=3", WAITS)
    holds(job, 0, story("signal", 3, False))
    assert [decision["wait_s"] for decision in decisions(job)] == [0.1, 0.2, 0.4]
    assert "after a wait of 0.4 s" in job.output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 86), (signal.SIGINT, 130)])
def test_a_signal_ends_the_wait(start_job: StartJob, number: int, code: int) -> None:
    job = start_job(faults("SIGKILL"), NPROC, "--max-restarts=3", "--ft-backoff=3600:3600")
    job.until(lambda: decisions(job), "the decision to restart")
    kill(job.process.pid, number)
    holds(job, code, story("signal", 1, False))
    assert len(job.journal("cycle_start")) == 1


# Codes that mean something.


def test_exit_16_goes_elsewhere_and_there_is_nowhere(start_job: StartJob) -> None:
    holds(start_job(faults("exit 16"), NPROC, "--max-restarts=3", "--workers-stop-timeout=2"), 16, story("exit", 0))


def test_exit_17_without_more_says_what_is_known(start_job: StartJob) -> None:
    """Megatron-LM's own machine ends a job with it after a transient error, too."""
    job = start_job(faults("exit 17"), NPROC, "--max-restarts=3", "--workers-stop-timeout=2")
    holds(job, 17, story("exit", 0))
    assert decisions(job)[-1]["reason"].startswith("exit code 17: result could not be validated; ")
    assert "17: result could not be validated; " in job.journal("fault")[0]["hint"]
    assert "computes wrongly" not in job.output


def test_a_code_that_ends_the_job(start_job: StartJob) -> None:
    flags = ("--max-restarts=3", "--ft-no-restart-exit-codes=3,4")
    holds(start_job(faults("exit 3"), NPROC, *flags), 93, story("exit", 0))


# Requests of a rank.


def asked(job: Job, request: str, action: str) -> None:
    """The journal tells the request, then what is done, then the end of the cycle, once each."""
    lines = job.journal("control_request", "decision", "cycle_end")
    assert [line["event"] for line in lines[:3]] == ["control_request", "decision", "cycle_end"], job.tail()
    told, decision, end = lines[:3]
    assert (told["rank"], told["action"], told["description"]) == (LAST, request, "injected on purpose")
    assert decision["action"] == action and decision["reason"].startswith(f"rank {LAST} asked for it")
    assert not decision["charged"] and {told["cycle"], decision["cycle"], end["cycle"]} == {0}
    assert request in end["how"] and decision["reason"] in job.output


@pytest.mark.parametrize(
    ("what", "request_", "action", "code"),
    [
        ("ask for the end", "stop_job", "give up", 95),
        ("ask for the end and exit", "stop_job", "give up", 95),
        ("ask to leave", "exclude_this_node", "leave", 94),
    ],
)
def test_a_rank_ends_the_job(start_job: StartJob, what: str, request_: str, action: str, code: int) -> None:
    job = start_job(faults(what), NPROC, "--max-restarts=3")
    holds(job, code)
    asked(job, request_, action)
    assert len(job.journal("cycle_start")) == 1
    assert "asked for it" in job.journal("job_end")[0]["reason"]


@pytest.mark.parametrize("what", ["ask for a restart", "ask for a restart and exit"])
def test_a_rank_restarts_the_job_at_no_charge(start_job: StartJob, what: str) -> None:
    job = start_job(faults(what), NPROC, "--max-restarts=0")
    holds(job, 0)
    asked(job, "restart", "restart")
    assert len(job.journal("cycle_start")) == 2


def test_all_ranks_ask_for_the_same(start_job: StartJob) -> None:
    """A rank that was stopped before it could ask does so in the next cycle; no request is followed twice."""
    job = start_job(Plan((PlannedFault("ask for a restart", "step", 4),)), NPROC, "--max-restarts=0")
    assert job.finish() == 0, job.tail()
    nothing_left(job)
    journal_tells(job, 0, [])
    cycles = [line["cycle"] for line in job.journal("cycle_start")]
    assert [decision["cycle"] for decision in decisions(job)] == cycles[:-1], job.tail()
    assert 2 <= len(cycles) <= 1 + NPROC, job.tail()
