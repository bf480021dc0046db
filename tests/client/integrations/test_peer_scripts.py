"""Scripts after the peer's documentation, run unmodified under `ft_launcher --ft-alias-nvrx`, two ranks each.

They import nothing of ours. `megatron_style.py` and `own_monitors.py` have tests of their own beside this one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left
from tests.faults.job import Job
from tests.faults.training import Plan
from tests.ports import free_port

HERE = Path(__file__).parent
LIMIT_S = 120.0


def run(start_job: StartJob, script: str, *flags: str) -> Job:
    """A job of two ranks under the alias, to its good end."""
    job = start_job(Plan(), 2, "--ft-alias-nvrx", *flags, script=HERE / script)
    assert job.finish(LIMIT_S) == 0, job.tail()
    nothing_left(job)
    return job


@pytest.mark.timeout(200)
def test_a_wrapper_with_all_callbacks_composed(start_job: StartJob, tmp_path: Path) -> None:
    # The training's own store is at the port next to that of the ranks' store.
    job = run(start_job, "peer_inprocess.py", f"--master-port={free_port(2)}")
    seen = [json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(2)]
    for one in seen:
        assert one["iterations"] == [0, 1, 2], job.tail()
        assert one["initialize"] == [[0, "ACTIVE"], [1, "ACTIVE"], [2, "ACTIVE"]]
        assert one["finalize"] == [False, False], "after the group was destroyed"
        assert one["steps"] == 6, "from the checkpoint of step 6"
    assert seen[0]["weight"] == seen[1]["weight"]
    assert [one["faults"] for one in seen] == [[], [1]], (
        "the fault of the peer's tools happened on the rank that was drawn"
    )
    assert "FT: Simulating fault: WORKLOAD_EXC; rank to fail: 1" in job.output
    assert [decision["action"] for decision in job.journal("decision")] == [], "level 1 alone"
    assert job.output.count("restarted in process after") == 2, job.tail()


@pytest.mark.timeout(200)
def test_heartbeats_by_the_api_of_the_first_releases(start_job: StartJob, tmp_path: Path) -> None:
    flat = {"current_timeouts": {"initial": 50.0, "subsequent": 30.0, "were_calculated": True}}
    (tmp_path / "ft_state.json").write_text(json.dumps(flat))
    flags = ("--ft-param-initial_rank_heartbeat_timeout=null", "--ft-param-rank_heartbeat_timeout=null")
    job = run(start_job, "peer_heartbeats.py", *flags)
    shown = [json.loads((tmp_path / f"shown-{rank}").read_text()) for rank in range(2)]
    loaded, learned = shown[0]
    assert shown[0] == shown[1], "the same on every rank"
    assert loaded == [50.0, 30.0, True]
    assert learned[2] and 10.0 <= learned[1] < 30.0, "the mean of the loaded limit and the learned one, or its floor"
    saved = json.loads((tmp_path / "ft_state.json").read_text())["current_timeouts"]["heartbeat"]
    assert [saved["initial"], saved["subsequent"], saved["were_calculated"]] == learned
    assert "get_state_dict_cb is never called" in job.output


@pytest.mark.timeout(200)
def test_a_detector_finds_the_slow_rank(start_job: StartJob) -> None:
    job = run(start_job, "peer_straggler.py")
    found = re.findall(r"slow: \{.*'data_loading': \[1\].*\}; 6 loads; nodes \[0, 1\]", job.output)
    assert len(found) == 2, job.tail()  # a forward of 0.1 ms may look slow beside it
    assert "a report by the interval" in job.output


@pytest.mark.timeout(200)
def test_lightnings_callbacks(start_job: StartJob, tmp_path: Path) -> None:
    if not importlib.util.find_spec("lightning") and not os.environ.get("CI"):
        pytest.skip("Lightning is not installed")
    flags = ("--max-restarts=1", "--ft-preload=lightning.pytorch", "--ft-rank-heartbeat-timeout=60")
    job = run(start_job, "peer_lightning.py", *flags)
    (fault,) = job.journal("fault")
    assert (fault["kind"], fault["iteration"]) == ("exception", 12), job.tail()
    assert (tmp_path / "finished").exists()
    learned = json.loads((tmp_path / "_ft_state.json").read_text())["current_timeouts"]["heartbeat"]
    assert learned["were_calculated"] and learned["subsequent"] >= 10
    assert "Worst performing 2/2 ranks:" in job.output
