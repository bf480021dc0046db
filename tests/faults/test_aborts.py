"""All ranks die of SIGABRT at the same moment, again and again: each time the cycle fails, and none hangs."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.training import Plan
from tests.program import clean_environment, run

LIMIT_S = 1200.0
DIED = 128 + signal.SIGABRT

RANK = """
import os, resource
from pathlib import Path

def abort(folder):
    "Waits for the others, so that all die within the same moment."
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cycle, world = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["WORLD_SIZE"])
    Path(folder, f"armed-{cycle}-{os.environ['RANK']}").touch()
    while not all(os.path.exists(f"{folder}/armed-{cycle}-{rank}") for rank in range(world)):
        pass
    os.abort()
"""
SCRIPT = f"{RANK}\nimport sys\nabort(sys.argv[1])\n"
PROGRAM = f"""{RANK}
if __name__ == "__main__":
    import sys
    from ft_launcher import LaunchConfig, launch

    folder, ranks, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, max_restarts=rounds - 1, journal_dir=folder + "/journal"
    )
    launch(abort, config)(folder)
"""

ROUNDS = [
    pytest.param(3, 2, id="some"),
    pytest.param(200, 2, marks=pytest.mark.slow, id="200 of 2"),
    pytest.param(200, 4, marks=pytest.mark.slow, id="200 of 4"),
]


def told(journal: str) -> list[tuple[int, str, int]]:
    lines = [json.loads(line) for line in journal.splitlines()]
    return [(line["cycle"], line["kind"], line["exit_code"]) for line in lines if line["event"] == "fault"]


@pytest.mark.parametrize(("rounds", "ranks"), ROUNDS)
def test_a_script(start_job: StartJob, tmp_path: Path, rounds: int, ranks: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    job = start_job(Plan(), ranks, f"--max-restarts={rounds - 1}", script=script)
    assert job.finish(LIMIT_S) == DIED, job.tail()
    (journal,) = job.journal_folder.glob("*.jsonl")
    assert told(journal.read_text()) == [(cycle, "signal", -signal.SIGABRT) for cycle in range(rounds)], job.tail()


@pytest.mark.parametrize(("rounds", "ranks"), ROUNDS)
def test_a_function(tmp_path: Path, rounds: int, ranks: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, "program.py", str(tmp_path), str(ranks), str(rounds)]
    done = run(words, folder=tmp_path, environ=clean_environment(), limit_s=LIMIT_S)
    assert done.returncode == 1 and "ChildFailedError" in done.stderr, done.stderr[-6000:]
    (journal,) = (tmp_path / "journal").glob("*.jsonl")
    expected = [(cycle, "signal", -signal.SIGABRT) for cycle in range(rounds)]
    assert told(journal.read_text()) == expected, done.stderr[-6000:]
