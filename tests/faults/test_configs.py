"""The files in `configs/`: each loads without a warning, says of each line what it does, and is run by a job.

`auto_learned.yaml` is run in `test_learned_limits_jobs.py`, `printed_steps.yaml` in `test_watch_log.py`, and
`megatron.yaml` and `lightning.yaml` by the tests of these integrations.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from ft_launcher.tools.commands.validate import validate
from tests.faults.conftest import StartJob
from tests.faults.invariants import Told, holds, nothing_left
from tests.faults.learned_worker import Order
from tests.faults.test_in_process import SCRIPT, ends_well, holding, say
from tests.faults.training import Plan, PlannedFault
from tests.nodes.store_host import StoreHost
from tests.ports import free_port
from tests.program import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
LEARNED_WORKER = Path(__file__).with_name("learned_worker.py")


def given(name: str) -> str:
    """The option for a file."""
    return f"--ft-cfg-path={ROOT / 'configs' / name}.yaml"


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_each_loads_and_each_line_says_what_it_does(file: Path) -> None:
    found = CliRunner().invoke(validate, [f"--ft-cfg-path={file}"])
    assert (found.exit_code, found.stderr) == (0, ""), found.output
    keys = yaml.safe_load(file.read_text())["fault_tolerance"]
    for key in keys:
        assert [line for line in found.stdout.splitlines() if line.strip().startswith(f"{key}:") and str(file) in line]
    for line in file.read_text().splitlines():
        assert "#" in line, f"without a word: {line}"


def test_there_is_one_for_each_way_to_be_watched() -> None:
    names = {file.stem for file in CONFIGS}
    assert names == {
        *("heartbeats", "sections", "auto_learned", "in_process", "spares", "megatron", "lightning", "fail_fast"),
        "printed_steps",
    }


@pytest.mark.parametrize(
    ("name", "limit", "shorter"),
    [
        ("sections", "section:step", "--ft-rank-section-timeouts=step:2"),
        ("fail_fast", "", "--ft-log-level=INFO"),
    ],
)
def test_a_job_under_it_recovers(start_job: StartJob, name: str, limit: str, shorter: str) -> None:
    fault = PlannedFault("sleep" if limit else "SIGKILL", rank=0)
    job = start_job(Plan((fault,)), 2, given(name), shorter, "--max-restarts=1")
    holds(job, 0, [Told("hang" if limit else "signal", {0}, limit)])
    if name == "fail_fast":
        assert "a hang in NCCL" not in job.output, "the job uses gloo"


def test_heartbeats(start_job: StartJob, tmp_path: Path) -> None:
    Order("heartbeats", hang_at=3, learns=False).save(tmp_path)
    job = start_job(
        Plan(), 1, given("heartbeats"), "--ft-rank-heartbeat-timeout=2", "--max-restarts=1", script=LEARNED_WORKER
    )
    assert job.finish() == 0, job.tail()
    nothing_left(job)
    assert [fault["limit"] for fault in job.journal("fault")] == ["subsequent"]


def test_in_process(start_job: StartJob) -> None:
    job = start_job(Plan(), 2, given("in_process"), "--max-restarts=0", script=SCRIPT)
    pids = holding(job, "0-0", {0, 1})
    say(job, "0-0", "raise 0")
    assert holding(job, "0-1", {0, 1}) == pids
    say(job, "0-1", "go")
    assert ends_well(job)["restarts_in_process"] == 1


@pytest.fixture
def store_port() -> Iterator[int]:
    """The port of a store apart: the spare may come when the job is over, and is told of the end then."""
    port = free_port()
    store = StoreHost(port, None)
    yield port
    store.kill()


def test_spares(start_job: StartJob, store_port: int) -> None:
    """Two nodes, of which the job needs one: the other waits, and is told when the job is done."""
    meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store_port}", "--rdzv-conf=is_host=0", "--rdzv-id=a")
    flags = (given("spares"), "--nnodes=1", *meet)
    nodes = first, _ = [start_job(Plan(hold=3), 1, *flags, name=name) for name in ("first", "second")]
    first.until(lambda: any(node.trained(3, 0, 1) for node in nodes), "one of them trains")
    first.until(lambda: all(len(node.journal("job_start")) == 1 for node in nodes), "both are there")
    first.go()
    assert [node.finish() for node in nodes] == [0, 0], "\n".join(node.tail() for node in nodes)
    for node in nodes:
        nothing_left(node)
    assert sorted(len(node.journal("cycle_start")) for node in nodes) == [0, 1]
