"""Learned limits over whole jobs: the first one learns them, the next one is judged by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left
from tests.faults.job import Job
from tests.faults.learned_worker import STATE_FILE, Order
from tests.faults.training import Plan
from tests.program import ROOT

WORKER = Path(__file__).with_name("learned_worker.py")
NO_LIMITS = f"--ft-cfg-path={ROOT}/configs/auto_learned.yaml"
FLOOR_S = 2.0
FLOOR = f"--ft-learned-limit-floor={FLOOR_S}"
AT_FIRST, LATER = "first", "second"


def run(start_job: StartJob, folder: Path, name: str, order: Order, *flags: str) -> Job:
    """A job that ends well."""
    order.save(folder)
    job = start_job(Plan(), 1, *flags, name=name, script=WORKER)
    assert job.finish(90) == 0, job.tail()
    nothing_left(job)
    return job


def state(folder: Path) -> Any:
    return json.loads((folder / STATE_FILE).read_text())["current_timeouts"]


def in_force(folder: Path, cycle: int) -> Any:
    """The limits at the start of a cycle, by the rank's own word."""
    return json.loads((folder / f"limits-{cycle}").read_text())


def verdicts(job: Job) -> list[tuple[str, float, bool]]:
    return [(one["limit"], one["limit_s"], one["learned"]) for one in job.journal("verdict") if one["condemned"]]


def doubled(job: Job) -> list[tuple[str, float]]:
    return [(line["limit"], line["factor"]) for line in job.journal("limit_doubled")]


def test_sections_are_learned_loaded_judged_doubled_and_added(start_job: StartJob, tmp_path: Path) -> None:
    """In the second job a first step beyond the learned limit is warm-up, and a hang is none; a new section is free."""
    first = run(start_job, tmp_path, AT_FIRST, Order(), NO_LIMITS, FLOOR)
    assert verdicts(first) == []
    learned = state(tmp_path)["section"]
    assert learned["calculated_sections"] == ["checkpointing", "setup", "step"]
    assert learned["is_out_of_section_calculated"]
    assert min(learned["section"].values()) == FLOOR_S <= learned["out_of_section"]
    step_s = learned["section"]["step"]
    order = Order(first_s=step_s + 0.5, hang_at=3, new_section="export")
    second = run(start_job, tmp_path, LATER, order, NO_LIMITS, FLOOR, "--max-restarts=1")
    assert verdicts(second) == [("section:step", step_s, True)], second.tail()
    assert doubled(second) == [("section:step", 2.0)]
    assert in_force(tmp_path, 0)["section"] == learned["section"]
    assert in_force(tmp_path, 1)["section"] == learned["section"] | {"step": 2 * step_s}
    assert f"limit section:step is {2 * step_s:g} s instead of {step_s:g} s" in second.output
    merged = state(tmp_path)["section"]
    assert merged["calculated_sections"] == ["checkpointing", "export", "setup", "step"]
    assert merged["section"]["step"] > step_s, "the mean of twice the old one and of the new one"


def test_heartbeats_are_learned_loaded_judged_and_doubled(start_job: StartJob, tmp_path: Path) -> None:
    run(start_job, tmp_path, AT_FIRST, Order("heartbeats"), NO_LIMITS, FLOOR)
    learned = state(tmp_path)["heartbeat"]
    assert learned["were_calculated"] and min(learned["initial"], learned["subsequent"]) >= FLOOR_S
    order = Order("heartbeats", learns=False, hang_at=3)
    second = run(start_job, tmp_path, LATER, order, NO_LIMITS, FLOOR, "--max-restarts=1")
    assert verdicts(second) == [("subsequent", learned["subsequent"], True)], second.tail()
    assert doubled(second) == [("subsequent", 2.0)]
    assert in_force(tmp_path, 1)["subsequent"] == 2 * learned["subsequent"]


def test_sections_alone_are_signs_of_life_under_limits_of_heartbeats(start_job: StartJob, tmp_path: Path) -> None:
    """The job takes longer than its limits; no heartbeat is ever sent. Nor do limits without measure harm it."""
    section = {"section": {"step": 1e300}, "calculated_sections": ["step"]}
    (tmp_path / STATE_FILE).write_text(json.dumps({"current_timeouts": {"section": section}}))
    limits = ("--ft-initial-rank-heartbeat-timeout=4", "--ft-rank-heartbeat-timeout=2")
    limits += ("--ft-rank-section-timeouts=step:1e308",)
    job = run(start_job, tmp_path, AT_FIRST, Order(steps=25, step_s=0.2), *limits)
    assert job.journal("verdict", "monitor_replaced") == []
    assert job.output.count("learned limits are not loaded") == 1
    assert "heartbeat" not in state(tmp_path), "nobody asked for it"
