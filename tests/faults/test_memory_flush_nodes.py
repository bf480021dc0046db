"""Two launchers of one job that share the storage of `--ft-memory-flush`: each writes what its ranks had."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rank_monitor.contract.processes import tmpfs
from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left
from tests.faults.job import Job
from tests.faults.test_memory_checkpoint import FLAGS, WORKER, write_plan
from tests.faults.training import Plan
from tests.ports import free_port

SHM = "/dev/shm"
NODES = ("first", "second")


@pytest.fixture
def memories() -> Iterator[list[Path]]:
    """A tmpfs folder for each node: on one machine two launchers of one key would share one."""
    if not os.access(SHM, os.W_OK) or tmpfs.kind_of(SHM) != tmpfs.KIND:
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir=SHM) as one, tempfile.TemporaryDirectory(dir=SHM) as other:
        yield [Path(one), Path(other)]


def start(start_job: StartJob, storage: Path, memories: list[Path], again: str) -> list[Job]:
    """The launchers of both nodes, with one rank each."""
    flags = (
        *("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=pair"),
        *("--rdzv-conf=join_timeout=60,last_call_timeout=1", f"--ft-memory-flush={storage}", *FLAGS),
    )
    return [
        start_job(Plan(), 1, *flags, f"--ft-memory-dir={memory}", script=WORKER, name=name + again)
        for name, memory in zip(NODES, memories, strict=True)
    ]


@pytest.mark.parametrize("step", [20, 15])
def test_two_nodes_that_are_preempted_go_on_from_the_storage(
    start_job: StartJob, tmp_path: Path, memories: list[Path], step: int
) -> None:
    """Also where the newest state of one node was not complete, and not written."""
    storage = tmp_path / "storage"
    storage.mkdir()
    write_plan(tmp_path, [(0, 22, [0, 1], "waits_for_the_end")])
    nodes = start(start_job, storage, memories, "")
    nodes[0].until(lambda: len(list(tmp_path.glob("waits-*"))) == 2, "the last save")
    nodes[0].process.send_signal(signal.SIGTERM)
    for node in nodes:
        assert node.finish(120) in (86, 87), node.tail()
        assert [event["step"] for event in node.journal("memory_flushed")] == [20], node.tail()
    if step < 20:
        shutil.rmtree(next(storage.glob("*/step-20_*")))
    write_plan(tmp_path)
    nodes = start(start_job, storage, memories, " again")
    for node in nodes:
        assert node.finish(120) == 0, node.tail()
        (loaded,) = node.journal("memory_loaded")
        assert (loaded["tier"], loaded["step"]) == ("flush", step), node.tail()
        nothing_left(node)
    for rank in range(2):
        found = json.loads((tmp_path / f"end-{rank}").read_text())
        assert (found["start"], found["same"]) == (step, True)
    assert not list(storage.iterdir())
