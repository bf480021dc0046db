"""The example as a reader runs it, and what the launcher's journal tells of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.program import run

EXAMPLE = Path(__file__).resolve().parents[3] / "scripts" / "examples" / "straggler.py"


def test_the_example_finds_its_slow_rank(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "ft_launcher", "--nproc-per-node=4", f"--ft-journal-dir={tmp_path}"]
    command = [*launch, EXAMPLE, "--slow-rank=1", "--interval=0.3"]
    done = run(command, folder=tmp_path, limit_s=120, check=True)
    assert "Some ranks have worse relative performance. Affected ranks: [1" in done.stdout
    assert done.stdout.count("saves and stops after step") == 4
    lines = [json.loads(line) for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()]
    told = [line for line in lines if line["event"] == "section_times"]
    assert {line["rank"] for line in told} == set(range(4))
    for line in told:
        own = line["sections"]["own work"]
        assert own["med_ms"] > 0 and own["num"] > 0 and 0 < own["individual"] <= 1
        assert line["rank"] != 1 or own["relative"] < 0.7
        assert line["gpu"] == {"relative": None, "individual": None}
