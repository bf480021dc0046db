"""Each fault of a wrapped function under the launcher: ranks go on in process; `--max-restarts` is not spent."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.in_process_fault_worker import FAULT
from tests.faults.invariants import nothing_left
from tests.faults.job import Job
from tests.faults.training import Plan

SCRIPT = Path(__file__).with_name("in_process_fault_worker.py")
SHORT = {
    "monitor_process_interval": 0.2,
    "monitor_thread_interval": 0.2,
    "progress_watchdog_interval": 0.2,
    "soft_timeout": 1.5,
    "hard_timeout": 3,
    "termination_grace_time": 0.5,
}


def run(start_job: StartJob, monkeypatch: pytest.MonkeyPatch, nproc: int, **fault: Any) -> tuple[Job, dict[int, Any]]:
    """The job, ended well, and what the function returned on each rank that came to its end."""
    monkeypatch.setenv(FAULT, json.dumps(fault))
    job = start_job(Plan(), nproc, "--max-restarts=0", "--ft-rejoin=false", script=SCRIPT)
    (job.folder / "results").mkdir(exist_ok=True)
    assert job.finish() == 0, job.tail()
    nothing_left(job)
    assert not job.journal("fault"), job.tail()
    return job, {int(file.name): json.loads(file.read_text()) for file in (job.folder / "results").iterdir()}


@pytest.mark.parametrize(
    "fault",
    [
        {"fault": "exception", "on": [1], "group": True},
        {"fault": "exception", "on": [0, 1, 2]},
        {"fault": "uncopyable", "on": [0]},
        {"fault": "in initialize", "on": [1]},
        {"fault": "hang", "on": [1], "group": True, "seconds": {**SHORT, "hard_timeout": 30}},
        {"fault": "livelock", "on": [0], "seconds": {**SHORT, "hard_timeout": 30}},
    ],
    ids=lambda fault: f"{fault['fault']} {fault['on']}",
)
def test_all_go_on(start_job: StartJob, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]) -> None:
    job, results = run(start_job, monkeypatch, 3, **fault)
    assert {rank: result[:2] for rank, result in results.items()} == {rank: [rank, 3] for rank in range(3)}
    assert job.journal("in_process_restart"), job.tail()
    assert not job.journal("in_process_fault")


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"fault": "SIGKILL", "on": [0], "group": True}, -9),
        ({"fault": "SIGKILL", "on": [1]}, -9),
        ({"fault": "SIGTERM", "on": [1]}, -15),
        ({"fault": "SIGSEGV", "on": [2]}, -11),
        ({"fault": "exit", "on": [0]}, 3),
        ({"fault": "gil", "on": [1], "seconds": SHORT}, -15),
    ],
    ids=lambda value: f"{value['fault']} {value['on']}" if isinstance(value, dict) else "",
)
def test_the_others_go_on(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], code: int
) -> None:
    job, results = run(start_job, monkeypatch, 3, **fault)
    assert sorted(result[:2] for result in results.values()) == [[0, 2], [1, 2]]
    (lost,) = job.journal("in_process_fault")
    assert lost["rank"] == fault["on"][0] and lost["rank"] not in results
    assert lost["exit_code"] == code or (code == -15 and lost["exit_code"] == -9), (
        "a rank that ignores SIGTERM is killed"
    )
    assert job.journal("finished_without")[0]["ranks"] == fault["on"]


def test_a_fault_that_comes_again_is_left_to_fresh_ranks(start_job: StartJob, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = {"fault": "exception", "on": [1], "times": 100, "options": {"same_error_limit": None}}
    monkeypatch.setenv(FAULT, json.dumps(fault))
    job = start_job(Plan(), 2, "--max-restarts=1", "--ft-same-error-limit=2", script=SCRIPT)
    assert job.finish() == 1, job.tail()
    nothing_left(job)
    reasons = [line["reason"] for line in job.journal("taken_over")]
    assert len(reasons) == 2, "one for each cycle"
    for reason in reasons:
        assert re.search(r"gave up: the same fault 2 times in a row: ValueError at .* on rank 1", reason)
    assert [(one["action"], one["charged"]) for one in job.journal("decision")] == [
        ("restart", True),
        ("give up", False),
    ]
    assert {one["rank"] for one in job.journal("fault")} == {1}, "whose error it was"
    assert [line["iteration"] for line in job.journal("in_process_restart")] == [1, 1]


def test_the_users_own_limit_decides_first(start_job: StartJob, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict.fromkeys(("same_error_limit", "no_progress_limit", "soft_timeout_limit"))
    fault = {"fault": "exception", "on": [1], "times": 100, "options": options, "retry": {"max_iterations": 5}}
    monkeypatch.setenv(FAULT, json.dumps(fault))
    job = start_job(Plan(), 2, "--max-restarts=0", script=SCRIPT)
    assert job.finish() == 1, job.tail()
    (taken,) = job.journal("taken_over")
    assert re.search(r"gave up: iteration=[56] is beyond max_iterations=5", taken["reason"])
    restarts = [line["iteration"] for line in job.journal("in_process_restart")]
    # The end of the rank that checks first may interrupt the other before its own check, which is in the next one then.
    assert restarts in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]), job.tail()


def told(log: str) -> list[tuple[int, str]]:
    """The rounds and phases that a rank reported, as its monitor has logged them; but those of an interruption: the
    function of a rank may have ended by itself before."""
    phases = [(int(number), phase) for number, phase in re.findall(r"round (\d+): (\w+)", log)]
    return [(number, phase) for number, phase in phases if phase != "interrupting"]


def test_a_spare_takes_over(start_job: StartJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the monitors saw of it stands where the wrapper wants it."""
    options = {"monitor_process_logfile": str(tmp_path / "monitor-{rank}")}
    _, results = run(start_job, monkeypatch, 4, fault="SIGKILL", on=[0], active=2, options=options)
    assert results == {1: [0, 2, 1], 2: [1, 2, 1], 3: None}
    seen = [(tmp_path / f"monitor-{rank}").read_text() for rank in range(4)]
    assert re.search(
        r"RankMonitorServer:0: watches process \d+.*round 0: running.*process \d+ has ended", seen[0], re.DOTALL
    )
    assert "done" not in seen[0]
    assert told(seen[1]) == [
        *((0, "arriving"), (0, "running"), (0, "recovering"), (0, "finalizing"), (0, "closing")),
        *((1, "running"), (1, "waiting"), (1, "completing"), (1, "done")),
    ]


def test_two_die_at_once(start_job: StartJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job, results = run(start_job, monkeypatch, 4, fault="SIGKILL", on=[1, 2])
    assert sorted(result[:2] for result in results.values()) == [[0, 2], [1, 2]]
    assert {line["rank"] for line in job.journal("in_process_fault")} == {1, 2}
