"""Both callbacks in the real Lightning with two ranks under the launcher: faults, restarts, the jobs that follow."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left
from tests.faults.job import Job
from tests.faults.training import Plan
from tests.program import ROOT

WORKER = Path(__file__).with_name("lightning_training.py")
EXAMPLE = ROOT / "scripts" / "examples" / "lightning_training.py"
CONFIG = f"--ft-cfg-path={ROOT}/configs/lightning.yaml"
SAVES_EVERY = 4
LIMIT_S = 150.0
WATCHES = pytest.mark.parametrize("watch", ["heartbeats", "sections"])
LIMITS = {"heartbeats": "--ft-rank-heartbeat-timeout=8", "sections": "--ft-rank-section-timeouts=step:8"}
KNOWN_AFTER_SAVES = {"heartbeats": None, "sections": ["checkpointing", "step"]}
HANGS = {"heartbeats": "subsequent", "sections": "section:step"}


@pytest.fixture(autouse=True)
def lightning() -> None:
    """Skips where Lightning is not installed; where `CI` is set, that is a failure."""
    if not importlib.util.find_spec("lightning") and not os.environ.get("CI"):
        pytest.skip("Lightning is not installed")


def train(
    start_job: StartJob,
    folder: Path,
    name: str,
    fits: list[dict[str, Any]],
    *flags: str,
    code: int = 0,
    warm: bool = True,
) -> Job:
    """A job of two ranks that makes these fits, to its end; `warm`: they find Lightning imported."""
    (folder / "fits.json").write_text(json.dumps([{"saves_every": SAVES_EVERY, **fit} for fit in fits]))
    (folder / "seen").unlink(missing_ok=True)
    imports = ["--ft-preload=lightning.pytorch"] if warm else ["--ft-warm-start=off"]
    job = start_job(Plan(), 2, CONFIG, *imports, *flags, script=WORKER, name=name)
    assert job.finish(LIMIT_S) == code, job.tail()
    nothing_left(job)
    return job


def steps(folder: Path, fit: int = 0) -> Iterator[list[int]]:
    """For each cycle the steps that rank 0 and 1 both made in a fit."""
    lines = [tuple(map(int, line.split())) for line in (folder / "seen").read_text().splitlines()]
    for cycle in range(1 + max(line[0] for line in lines)):
        ranks = [[step for c, r, n, step in lines if (c, r, n) == (cycle, rank, fit)] for rank in (0, 1)]
        yield min(ranks, key=len)


def learned(folder: Path) -> dict[str, Any]:
    file = folder / "_ft_state.json"
    found = json.loads(file.read_text())["current_timeouts"] if file.exists() else {}
    return dict(found)


@WATCHES
def test_hang_crash_and_failed_validation_one_after_the_other(start_job: StartJob, tmp_path: Path, watch: str) -> None:
    """A simulated hang of rank 1, a crash of rank 0, an exception of rank 1 in validation: each is resumed from."""
    hung = {"fault_type": "rank_hung", "base_delay": 1.0, "rank_to_fail": 1}
    faults = {
        0: {"simulated": hung, "inject": {"in": "training", "step": 7, "rank": 1, "what": "waits"}},
        1: {"inject": {"in": "training", "step": 14, "rank": 0, "what": "killed"}},
        2: {"inject": {"in": "validation", "step": 19, "rank": 1, "what": "raises"}},
    }
    fit = {"watch": watch, "limits": {"max_steps": 24}, "faults": faults}
    job = train(start_job, tmp_path, "job", [fit], "--max-restarts=3", LIMITS[watch])
    told = [(fault["kind"], fault["rank"], fault["limit"]) for fault in job.journal("fault")]
    assert told == [("hang", 1, HANGS[watch]), ("signal", 0, ""), ("exception", 1, "")], job.tail()
    assert "FT: Simulating fault: rank_hung; rank to fail: 1" in job.output
    assert [decision["action"] for decision in job.journal("decision")] == ["restart"] * 3, job.tail()
    made = list(steps(tmp_path))
    assert len(made) == 4 and made[0][0] == 0 and made[-1][-1] == 23, job.tail()
    for before, after in pairwise(made):
        assert after == list(range(after[0], after[-1] + 1))
        assert 0 < after[0] <= before[-1] + 1 and after[0] % SAVES_EVERY == 0, "from the last checkpoint"
    at = tmp_path / "training"
    assert (at / "finished").read_text() == "step 24 of 24\n"
    assert job.output.count("training is complete") == 1, "and only then"
    loaded_and_saved = {"heartbeats": "heartbeat", "sections": "section"}[watch]
    assert list(learned(at)) == [loaded_and_saved]


@WATCHES
def test_jobs_go_on_until_the_flag_is_there(start_job: StartJob, tmp_path: Path, watch: str) -> None:
    """The first job dies, the second resumes, learns and completes; further fits know what it learned."""
    at = tmp_path / "training"
    training = {"watch": watch, "limits": {"max_epochs": 2}, "stragglers": True, "logger": True}
    dies = training | {"faults": {0: {"inject": {"in": "training", "step": 26, "rank": 0, "what": "killed"}}}}
    job = train(start_job, tmp_path, "first", [dies], code=137)
    assert not (at / "finished").exists()
    assert learned(at).get("section", {}).get("calculated_sections") == KNOWN_AFTER_SAVES[watch]
    assert "heartbeat" not in learned(at)

    in_time = {"watch": watch, "limits": {"max_epochs": -1, "max_time": {"seconds": 1}}, "step_s": 0.1}
    ends = {"watch": watch, "limits": {"max_epochs": -1, "max_steps": 80}, "patience": 9}
    job = train(start_job, tmp_path, "second", [training, in_time, ends])
    made = [next(iter(steps(tmp_path, number))) for number in range(3)]
    assert made[0] == list(range(24, 40)) and made[2][-1] == 79
    reasons = re.findall(r"training is complete \((.*)\): wrote", job.output)
    assert [reasons[0], reasons[2]] == ["epoch 2 of 2", "step 80 of 80"] and (at / "finished").exists()
    assert reasons[1] == f"its time was up after step {made[1][-1] + 1}"

    assert "Fault tolerance timeouts loaded" in job.output and len(learned(at)) == 1
    if watch == "heartbeats":
        beats = learned(at)["heartbeat"]
        assert beats["were_calculated"] and beats["initial"] >= 10 <= beats["subsequent"]
    else:
        sections = learned(at)["section"]
        assert sections["calculated_sections"] == ["checkpointing", "setup", "step"]
        assert sections["is_out_of_section_calculated"]
        assert min(sections["out_of_section"], *sections["section"].values()) >= 10
    in_force = [(line["rank"], line["initial"], line["sections"]) for line in job.journal("limits")]
    assert {rank for rank, *_ in in_force} == {0, 1}
    assert in_force[-1][1:] == in_force[-2][1:], "the same on all ranks"
    assert "Worst performing 2/2 ranks:" in job.output
    (metrics, *_) = (at / "logs").rglob("metrics.csv")
    assert "section_relative_perf/min" in metrics.read_text()


@pytest.mark.slow
def test_the_example_as_the_guide_runs_it(start_job: StartJob, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    words = f"sys.argv = [{str(EXAMPLE)!r}, '--folder', sys.argv[1] + '/out']"
    script.write_text(f"import runpy, sys\n{words}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n")
    flags = ("--max-restarts=1", "--ft-preload=lightning.pytorch", "--ft-inject", "rank:1,kind:sigkill,step:30")
    job = start_job(Plan(), 2, *flags, script=script)
    assert job.finish(LIMIT_S) == 0, job.tail()
    (fault,) = job.journal("fault")
    assert (fault["rank"], fault["iteration"]) == (1, 30), job.tail()
    ends = set(re.findall(r"^rank [01]: step 60, weight (.*)$", job.output, re.MULTILINE))
    assert len(ends) == 1, job.tail()
    assert (tmp_path / "out" / "finished").read_text() == "step 60 of 60\n"
    assert "out_of_section" in learned(tmp_path / "out" / "ft_state")["section"]


@pytest.mark.slow
@WATCHES
def test_a_simulated_crash_and_a_hang_in_a_save_after_a_cold_start(
    start_job: StartJob, tmp_path: Path, watch: str
) -> None:
    killed = {"fault_type": "rank_killed", "base_delay": 1.0, "rank_to_fail": 0}
    faults = {
        0: {"simulated": killed, "inject": {"in": "training", "step": 7, "rank": 0, "what": "waits"}},
        1: {"inject": {"in": "saving", "step": 12, "rank": 1, "what": "waits"}},
    }
    fit = {"watch": watch, "limits": {"max_steps": 24}, "faults": faults}
    limits = {"heartbeats": LIMITS["heartbeats"], "sections": "--ft-rank-section-timeouts=step:60,checkpointing:8"}
    job = train(start_job, tmp_path, "job", [fit], "--max-restarts=2", limits[watch], warm=False)
    told = [(fault["kind"], fault["rank"], fault["limit"]) for fault in job.journal("fault")]
    passed = {"heartbeats": "subsequent", "sections": "section:checkpointing"}
    assert told == [("signal", 0, ""), ("hang", 1, passed[watch])], job.tail()
    assert "FT: Simulating fault: rank_killed; rank to fail: 0" in job.output
    made = list(steps(tmp_path))
    assert made[2][0] == 8 and made[2][-1] == 23, "from the last whole checkpoint"
    assert (tmp_path / "training" / "finished").read_text() == "step 24 of 24\n"
