"""Two launchers of one job whose rendezvous is a real etcd: our `etcd-v3`, and torch's own `etcd-v2` and `etcd`."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import ft_launcher
from tests.etcd_server import EtcdServer, running_etcd
from tests.faults.invariants import nothing_left, result_is_fault_free
from tests.faults.job import Job
from tests.faults.training import Plan, PlannedFault
from tests.nodes.test_store_load import left

LIMIT_S = 150
WORLD = 2
FAULTY_RANK = 1
RENDEZVOUS = {
    "etcd-v2": "join_timeout=60,last_call_timeout=1,read_timeout=20",
    "etcd-v3": "join_timeout=60,last_call_timeout=1,read_timeout=20",
    "etcd": "timeout=60,last_call_timeout=1,etcd_prefix=/test/p2p",
}
"""Backend -> settings of it."""
OURS = "etcd-v3"


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    with running_etcd() as server:
        yield server


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Where a test puts its launchers; what a failed one left of them is ended by pid."""
    started: list[Job] = []
    yield started
    for job in started:
        job.kill_all()


def train(jobs: list[Job], etcd: EtcdServer, backend: str, plan: Plan, folder: Path, run_id: str) -> None:
    """Two nodes of one rank come to the end, with the result of a training without faults, and leave nothing."""
    flags = (
        "--nnodes=2",
        f"--rdzv-backend={backend}",
        f"--rdzv-endpoint={etcd.endpoint}",
        f"--rdzv-id={run_id}",
        f"--rdzv-conf={RENDEZVOUS[backend]}",
        "--max-restarts=2",
    )
    nodes = [Job(folder, plan, WORLD // 2, flags, name=name) for name in ("first", "second")]
    jobs += nodes
    assert [node.finish(LIMIT_S) for node in nodes] == [0, 0], "\n".join(node.tail() for node in nodes)
    for node in nodes:
        nothing_left(node)
    result_is_fault_free(nodes[0], WORLD)
    assert backend != OURS or not left(etcd), "torch's handlers leave their records"


def test_a_node_alone_with_the_server_of_torch(jobs: list[Job], etcd: EtcdServer, tmp_path: Path) -> None:
    """`ft_launcher.EtcdServer` is what a script would use; the fixture sees to it that etcd is installed."""
    own = ft_launcher.EtcdServer(str(tmp_path / "etcd"))
    own.start(stderr=subprocess.DEVNULL)
    try:
        endpoint = ("--rdzv-backend=etcd-v2", f"--rdzv-endpoint={own.get_endpoint()}", f"--rdzv-id={tmp_path.name}")
        plan = Plan((PlannedFault("SIGKILL", rank=FAULTY_RANK),))
        jobs.append(Job(tmp_path, plan, WORLD, ("--nnodes=1", "--max-restarts=1", *endpoint)))
        assert jobs[0].finish(LIMIT_S) == 0, jobs[0].tail()
    finally:
        own.stop()
    nothing_left(jobs[0])
    result_is_fault_free(jobs[0], WORLD)
    assert cycles(jobs) == [[0, 1]]


def test_records_are_where_the_key_of_torch_says(jobs: list[Job], etcd: EtcdServer, tmp_path: Path) -> None:
    conf = "--rdzv-conf=etcd_prefix=/test/own"
    flags = ("--rdzv-backend=etcd", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=own", conf)
    jobs.append(Job(tmp_path, Plan(hold=1), 1, ("--nnodes=1", *flags)))
    jobs[0].until_ranks_train(1)
    records = _records(etcd)
    jobs[0].go()
    assert jobs[0].finish(LIMIT_S) == 0, jobs[0].tail()
    assert records and all(key.startswith("/test/own/") for key in records), records


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_a_process_group_forms_over_the_handlers_of_torch(
    jobs: list[Job], etcd: EtcdServer, backend: str, tmp_path: Path
) -> None:
    """With `etcd` rank 0 makes the ranks' store: nobody else may hold its port."""
    script = tmp_path / "group.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n")
    flags = ("--nnodes=1", f"--rdzv-backend={backend}", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=group")
    jobs.append(Job(tmp_path, Plan(), WORLD, flags, script=script))
    assert jobs[0].finish(LIMIT_S) == 0, jobs[0].tail()


def _records(etcd: EtcdServer) -> list[str]:
    """The keys of all that is kept by the v2 API."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{etcd.endpoint}/v2/keys/?recursive=true", timeout=20) as answer:
        nodes = [json.load(answer)["node"]]
    found = []
    while nodes:
        node = nodes.pop()
        nodes += node.get("nodes", [])
        if not node.get("dir"):
            found.append(node["key"])
    return found


def cycles(jobs: list[Job]) -> list[list[int]]:
    return [[line["cycle"] for line in job.journal("cycle_start")] for job in jobs]


@pytest.mark.parametrize("backend", RENDEZVOUS)
def test_a_crash_on_one_node_restarts_both_and_the_next_job_counts_its_own_cycles(
    jobs: list[Job], etcd: EtcdServer, backend: str, tmp_path: Path
) -> None:
    """The next job has the same id; only torch's handlers cannot use one again."""
    train(jobs, etcd, backend, Plan((PlannedFault("SIGKILL", rank=FAULTY_RANK),)), tmp_path / "a", "job")
    told = [(fault["rank"], fault["cycle"]) for job in jobs for fault in job.journal("fault")]
    assert told == [(FAULTY_RANK, 0)], "\n".join(job.tail() for job in jobs)
    train(jobs, etcd, backend, Plan(), tmp_path / "b", "job" if backend == OURS else "other")
    assert cycles(jobs) == [[0, 1], [0, 1], [0], [0]]
