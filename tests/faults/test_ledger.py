"""The time ledger of real jobs: what the journal says of their time adds up, whatever happens to them."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.record.ledger.attempts import account_of
from rank_monitor.contract.wire.messages import NO_ITERATION
from tests.faults.conftest import StartJob
from tests.faults.invariants import Told, holds
from tests.faults.job import Job, kill
from tests.faults.ledger_worker import KILLED_IN, SAVED, STEPS
from tests.faults.training import ITERATIONS, Plan, PlannedFault
from tests.ft_launcher.tools.report.lines import collected

WORKER = Path(__file__).with_name("ledger_worker.py")
ROUNDED = 1e-3
"""Each figure of the journal is rounded to a microsecond."""


def adds_up(job: Job) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Checks that the parts follow each other and that all sums are right; returns the parts and the end."""
    parts = [part for part in job.journal("ledger") if part["has_ended"]]
    (end,) = job.journal("job_end")
    for part in parts:
        assert math.isclose(sum(part["seconds"].values()), part["until"] - part["since"], abs_tol=ROUNDED)
        assert min(part["seconds"].values()) > 0
    for before, after in itertools.pairwise(parts):
        assert math.isclose(before["until"], after["since"], abs_tol=ROUNDED)
    assert math.isclose(sum(end["seconds"].values()), end["wall_s"], abs_tol=ROUNDED)
    assert math.isclose(parts[-1]["until"] - parts[0]["since"], end["wall_s"], abs_tol=ROUNDED)
    assert parts[0]["since"] <= job.journal("job_start")[0]["t"]
    assert parts[-1]["until"] <= end["t"] + ROUNDED
    merged = account_of(collected(job.journal()).times())
    for category, spent_s in end["seconds"].items():
        assert merged.seconds[category] == pytest.approx(spent_s, abs=0.02 + 0.01 * spent_s), category
    return parts, end


def test_a_healthy_job_with_sections(start_job: StartJob) -> None:
    job = start_job(Plan(), 2, script=WORKER)
    assert job.finish() == 0
    (cycle, rest), end = adds_up(job)
    assert (cycle["saves"], rest["saves"]) == (1, 0)
    assert (cycle["cycle"], cycle["iteration"], cycle["saved"], cycle["resumed"]) == (0, STEPS - 1, SAVED - 1, -1)
    assert (rest["cycle"], rest["recovery"], cycle["recovery"]) == (None, {}, {})
    expected = {"launch", "setup", "data", "step", "checkpoint_save", "evaluation", "custom:upload", "stop"}
    assert expected <= end["seconds"].keys()
    assert not {"lost_progress", "detection"} & end["seconds"].keys()
    assert 0 < end["goodput_saved"] < end["goodput"] < 1


def test_a_crash_after_a_checkpoint(start_job: StartJob, tmp_path: Path) -> None:
    """The other rank's ledger tells of the steps that were done after it, and again in the next cycle."""
    (tmp_path / "die-1").touch()
    job = start_job(Plan(), 2, "--max-restarts=1", script=WORKER)
    assert job.finish() == 0
    (first, second, _), end = adds_up(job)
    assert first["saved"] == SAVED - 1 and first["iteration"] >= KILLED_IN - 2
    assert second["resumed"] == SAVED
    assert end["seconds"]["lost_progress"] > 0 and second["seconds"]["checkpoint_load"] > 0
    phases = {"detection", "stop", "backoff", "health", "rendezvous", "start", "first_step"}
    assert second["recovery"].keys() == phases
    assert first["recovery"] == {}
    done = first["seconds"]["step"] + second["seconds"]["step"]
    assert 0 < end["seconds"]["step"] < done
    assert end["goodput"] == pytest.approx(end["seconds"]["step"] / end["wall_s"], abs=1e-5)


def test_a_hang_is_detection(start_job: StartJob) -> None:
    plan = Plan((PlannedFault("sleep", "step", 4, rank=1),))
    job = start_job(plan, 2, "--max-restarts=1", "--ft-rank-section-timeouts=step:2,waiting:60")
    holds(job, 0, [Told("hang", {1}, "section:step")])
    (first, second, _), end = adds_up(job)
    assert second["recovery"]["detection"] == first["seconds"]["detection"] > 0
    assert end["seconds"]["lost_progress"] > 0


def test_a_monitor_that_is_killed_loses_no_time(start_job: StartJob) -> None:
    job = start_job(Plan(hold=3), 2)
    job.until_ranks_train(3)
    kill(job.monitor(0))
    job.until(lambda: job.journal("monitor_replaced"), "the monitor is replaced")
    job.go()
    holds(job, 0)
    (cycle, _), end = adds_up(job)
    assert cycle["iteration"] == ITERATIONS - 1 != NO_ITERATION
    assert end["seconds"]["step"] > 0 and end["seconds"]["custom:waiting"] > 0


def test_a_job_without_a_journal_writes_nothing(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(Plan(), 1, "--ft-journal-dir=", script=WORKER)
    assert job.finish() == 0
    assert not job.journal_folder.exists() and not list(tmp_path.rglob("*.jsonl"))
