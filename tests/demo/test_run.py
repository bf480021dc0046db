"""The demo as a stranger runs it: what it claims must hold, and it says so by its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "scripts" / "demo" / "run.py"


@pytest.mark.timeout(600)
def test_faults_change_nothing_in_the_weights(tmp_path: Path) -> None:
    command = [sys.executable, DEMO, f"--out={tmp_path}", "--epochs=9"]  # enough for every fault, and for the accuracy
    quick = dict(os.environ, FT_PRELOAD="torch._dynamo,sklearn.model_selection")  # or each rank of each cycle would
    demo = subprocess.run(command, env=quick, check=False, capture_output=True, text=True, timeout=580)
    assert demo.returncode == 0, demo.stdout + demo.stderr
