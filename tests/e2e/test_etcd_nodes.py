"""Two launchers of one job whose rendezvous is a real etcd, by `etcd-v2`, `etcd-v3` and the legacy `etcd`."""

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
from tests.faults.training import Plan, Strike
from tests.nodes.test_store_load import left

LIMIT_S = 150
WORLD = 2
STRUCK = 1
RENDEZVOUS = {
    "etcd-v2": "join_timeout=60,last_call_timeout=1,read_timeout=20",
    "etcd-v3": "join_timeout=60,last_call_timeout=1,read_timeout=20",
    "etcd": "timeout=60,last_call_timeout=1,etcd_prefix=/test/p2p",
}
"""Backend -> settings of it."""


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
    assert backend == "etcd" or not left(etcd, backend), "torch's legacy handler leaves its records"


@pytest.mark.parametrize("backend", ["etcd-v2"])
def test_a_node_alone_with_the_server_of_torch(jobs: list[Job], etcd: EtcdServer, backend: str, tmp_path: Path) -> None:
    """`ft_launcher.EtcdServer` is what a script would use; the fixture sees to it that etcd is installed."""
    own = ft_launcher.EtcdServer(str(tmp_path / "etcd"))
    own.start(stderr=subprocess.DEVNULL)
    try:
        endpoint = (f"--rdzv-backend={backend}", f"--rdzv-endpoint={own.get_endpoint()}", f"--rdzv-id={tmp_path.name}")
        plan = Plan((Strike("SIGKILL", rank=STRUCK),))
        jobs.append(Job(tmp_path, plan, WORLD, ("--nnodes=1", "--max-restarts=1", *endpoint)))
        assert jobs[0].finish(LIMIT_S) == 0, jobs[0].tail()
    finally:
        own.stop()
    nothing_left(jobs[0])
    result_is_fault_free(jobs[0], WORLD)
    assert cycles(jobs) == [[0, 1]]


@pytest.mark.parametrize(
    ("backend", "conf"),
    [
        ("etcd-v2", "key_prefix=/test/own,ttl=9000"),
        ("etcd-v2", "etcd_prefix=test/own"),
        ("etcd", "etcd_prefix=/test/own"),
    ],
    ids=["etcd-v2 key_prefix", "etcd-v2 etcd_prefix", "etcd"],
)
def test_records_are_where_the_keys_say(
    jobs: list[Job], etcd: EtcdServer, backend: str, conf: str, tmp_path: Path
) -> None:
    flags = (f"--rdzv-backend={backend}", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=own", f"--rdzv-conf={conf}")
    jobs.append(Job(tmp_path, Plan(hold=1), 1, ("--nnodes=1", *flags)))
    jobs[0].until_ranks_train(1)
    records = _records(etcd)
    jobs[0].go()
    assert jobs[0].finish(LIMIT_S) == 0, jobs[0].tail()
    assert records and all(key.startswith("/test/own/") for key in records), records
    lives_s = [ttl for ttl in records.values() if ttl is not None]
    assert "ttl" not in conf or (lives_s and all(7200 < ttl <= 9000 for ttl in lives_s)), records


def test_a_process_group_forms_over_the_legacy_etcd(jobs: list[Job], etcd: EtcdServer, tmp_path: Path) -> None:
    """Torch's handler has rank 0 make the ranks' store: nobody else may hold its port."""
    script = tmp_path / "group.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n")
    flags = ("--nnodes=1", "--rdzv-backend=etcd", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=group")
    jobs.append(Job(tmp_path, Plan(), WORLD, flags, script=script))
    assert jobs[0].finish(LIMIT_S) == 0, jobs[0].tail()


def _records(etcd: EtcdServer) -> dict[str, int | None]:
    """Key -> seconds it has left (None: for ever), of all that is kept by the v2 API."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{etcd.endpoint}/v2/keys/?recursive=true", timeout=20) as answer:
        nodes = [json.load(answer)["node"]]
    found = {}
    while nodes:
        node = nodes.pop()
        nodes += node.get("nodes", [])
        if not node.get("dir"):
            found[node["key"]] = node.get("ttl")
    return found


def cycles(jobs: list[Job]) -> list[list[int]]:
    return [[line["cycle"] for line in job.journal("cycle_start")] for job in jobs]


@pytest.mark.parametrize("backend", RENDEZVOUS)
def test_a_crash_on_one_node_restarts_both_and_the_next_job_counts_its_own_cycles(
    jobs: list[Job], etcd: EtcdServer, backend: str, tmp_path: Path
) -> None:
    """The next job has the same id; only torch's legacy handler cannot use one again."""
    train(jobs, etcd, backend, Plan((Strike("SIGKILL", rank=STRUCK),)), tmp_path / "a", "job")
    told = [(fault["rank"], fault["cycle"]) for job in jobs for fault in job.journal("fault")]
    assert told == [(STRUCK, 0)], "\n".join(job.tail() for job in jobs)
    train(jobs, etcd, backend, Plan(), tmp_path / "b", "other" if backend == "etcd" else "job")
    assert cycles(jobs) == [[0, 1], [0, 1], [0], [0]]
