"""The example of an agreed stop under the launcher: told to end twice and resumed, it has the weights of a calm run."""

from __future__ import annotations

import re
import signal
import tempfile
from pathlib import Path

from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left
from tests.faults.job import Job
from tests.faults.training import Plan
from tests.program import ROOT

EXAMPLE = ROOT / "scripts" / "examples" / "preemption.py"
SHORT = Path(tempfile.gettempdir())
"""Loader workers make Unix sockets in TMPDIR, whose path must not be long."""
LIMIT_S = 240.0
MANY = 400  # steps, more than are made before the signal
MORE = 4

SCRIPT = """
import runpy, sys
sys.argv = [{example!r}, "--folder", sys.argv[1] + "/{state}", *{words!r}]
if __name__ == "__main__":
    runpy.run_path({example!r}, run_name="__main__")
"""


def start(start_job: StartJob, folder: Path, name: str, words: tuple[str, ...], *flags: str, state: str) -> Job:
    script = folder / f"{name}.py"
    script.write_text(SCRIPT.format(example=str(EXAMPLE), state=state, words=list(words)))
    return start_job(Plan(), 2, *flags, name=name, script=script, tmp=SHORT / f"{folder.name[-8:]}-{name}")


def step_of(job: Job, rank: int) -> int:
    """The last step that a rank told of."""
    return max(map(int, re.findall(rf"^rank {rank}: step (\d+)$", job.output, re.MULTILINE)), default=0)


def is_preempted(job: Job, number: signal.Signals, ranks_get: signal.Signals, after: int) -> int:
    """Tells the launcher to end once its ranks have come so far; returns the step that all have saved."""
    job.until(lambda: min(step_of(job, 0), step_of(job, 1)) > after, f"step {after + 1}", LIMIT_S)
    job.process.send_signal(number)
    assert job.finish(LIMIT_S) == 86, job.tail()
    nothing_left(job)
    assert step_of(job, 0) == step_of(job, 1), job.tail()
    assert job.output.count(f"Received signal {ranks_get:d}, initiating graceful stop") == 2, job.tail()
    assert job.output.count(f"exiting program after receiving {ranks_get.name}.") == 1, job.tail()
    assert not job.journal("decision") and not job.journal("fault"), job.tail()  # nothing is charged
    assert "Traceback" not in job.output, job.tail()
    return step_of(job, 0)


def weights(job: Job) -> set[str]:
    assert job.finish(LIMIT_S) == 0, job.tail()
    found = re.findall(r"steps done, weights (.+)", job.output)
    assert len(found) == 2, job.tail()
    return set(found)


def test_told_twice_and_resumed_with_the_same_weights(start_job: StartJob, tmp_path: Path) -> None:
    many = ("--steps", str(MANY))
    job = start(start_job, tmp_path, "first", many, state="state")
    first = is_preempted(job, signal.SIGTERM, signal.SIGTERM, after=0)
    flags = ("--ft-preemption-signal=SIGUSR2",)
    job = start(start_job, tmp_path, "second", (*many, "--signal", "SIGUSR2"), *flags, state="state")
    second = is_preempted(job, signal.SIGHUP, signal.SIGUSR2, after=first)
    assert job.output.count(f"resumed after step {first}") == 2, job.tail()
    words = ("--steps", str(second + MORE), "--step-s", "0")
    resumed = start(start_job, tmp_path, "third", words, state="state")
    calm = start(start_job, tmp_path, "calm", words, state="calm")
    assert weights(resumed) == weights(calm)
    assert len(weights(calm)) == 1, "all ranks have the same"
    for name in ("first", "second", "third", "calm"):
        (SHORT / f"{tmp_path.name[-8:]}-{name}").rmdir()
