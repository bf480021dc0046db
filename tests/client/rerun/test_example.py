"""The example of the guide, run as the guide says."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import program

EXAMPLE = Path(__file__).resolve().parents[3] / "scripts" / "examples" / "rerun.py"


def run(folder: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, str(EXAMPLE), f"--folder={folder}", *words]
    done = program.run(command, limit_s=120)
    return done.returncode, done.stdout + done.stderr


def test_a_broken_device_is_found_and_costs_no_step(tmp_path: Path) -> None:
    code, calm = run(tmp_path / "calm")
    assert code == 0, calm
    code, output = run(tmp_path, "--node=a", "--broken-node=a")
    assert code == 16, output
    assert "Unexpected result tensor(nan) on rank 0 at iteration #3 invocation #1 (message='loss is NaN')" in output
    code, output = run(tmp_path, "--node=b", "--broken-node=a")
    assert code == 17, output
    assert "Possible persistent error! (rank 0, iteration #3, node a, device cpu, message='loss is NaN')" in output
    code, output = run(tmp_path, "--node=b")
    assert code == 0, output
    assert output == calm
