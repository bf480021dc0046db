"""The report on a real job, one of whose ranks died, as a user asks for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.test_ledger import ROUNDED, WORKER
from tests.faults.training import Plan
from tests.program import run


def test_a_job_with_a_crash(start_job: StartJob, tmp_path: Path) -> None:
    (tmp_path / "die-1").touch()
    job = start_job(Plan(), 2, "--max-restarts=1", script=WORKER)
    assert job.finish() == 0
    outputs = ["-o", str(tmp_path / "x.json"), "-o", str(tmp_path / "x.html"), "--trace", str(tmp_path / "trace.json")]
    ended = run([sys.executable, "-m", "ft_launcher", "report", str(job.journal_folder), *outputs], limit_s=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "on 1 node in 1 attempt; " in ended.stdout and "1 fault cost " in ended.stdout
    found = json.loads((tmp_path / "x.json").read_text())
    (end,) = job.journal("job_end")
    assert found["wall_s"] == pytest.approx(end["wall_s"], abs=ROUNDED)
    assert found["goodput"] == pytest.approx(end["goodput"], abs=0.02)
    assert found["saves"]["count"] == 1
    (fault,) = found["faults"]
    (told,) = job.journal("fault")
    (_, second, _) = [part for part in job.journal("ledger") if part["has_ended"]]
    assert (fault["rank"], fault["kind"], fault["ranks"], fault["cycle"]) == (1, "signal", 2, 0)
    assert (fault["what"], fault["phases"]) == (told["what"], second["recovery"])
    assert fault["lost_s"] == pytest.approx(found["seconds"]["lost_progress"], abs=ROUNDED)
    assert "died of SIGKILL" in (tmp_path / "x.html").read_text()
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"cycle 0", "cycle 1", "start", "signal"} <= names
