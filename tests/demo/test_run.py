"""The demo as a stranger runs it: what it claims must hold, and it says so by its exit code."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.patience import patient
from tests.program import run

DEMO = Path(__file__).resolve().parents[2] / "scripts" / "demo" / "run.py"


@pytest.mark.timeout(patient(600))
def test_faults_change_nothing_in_the_weights_and_the_report_says_what_they_cost(tmp_path: Path) -> None:
    command = [sys.executable, DEMO, f"--out={tmp_path}", "--epochs=9"]  # enough for every fault, and for the accuracy
    quick = dict(os.environ, FT_PRELOAD="torch._dynamo,sklearn.model_selection")  # or each rank of each cycle would
    shown = run(command, environ=quick, limit_s=580, check=True).stdout
    for name in ("with_faults", "in_memory"):
        page = tmp_path / name / "report.html"
        assert str(page) in shown and page.read_text().startswith("<!DOCTYPE html>")
    assert re.search(
        r"  ok    steps lost by the faults: \[\d+, \d+, \d+\] without, \[[0-2], [0-2], [0-2]\] with", shown
    )
    assert re.search(r"goodput without faults: \d+\.\d% .*\n  goodput with faults: \d+\.\d% ", shown)
    for fault in ("signal of rank 1", "hang of rank 1", "exception of rank 0"):
        assert re.search(rf"  [\d-]+ [\d:]+ {fault} on .*\n    .*stop .*first_step ", shown), fault
