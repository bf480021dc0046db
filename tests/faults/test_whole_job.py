"""Two launchers of one job on loopback: what is said of the ranks of all nodes, asked at one of them."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

from tests.etcd_server import running_etcd
from tests.faults.conftest import StartJob
from tests.faults.job import Job
from tests.faults.test_status import command, get, status
from tests.faults.test_top import top
from tests.faults.test_two_nodes import WORLD, global_ranks
from tests.faults.training import Plan
from tests.ports import free_port
from tests.terminal import Terminal


def test_each_node_shows_where_all_ranks_are(start_job: StartJob) -> None:
    """The stacks of all nodes, asked at either; and at one while the other's launcher stands still."""
    port = free_port()
    flags = (
        *("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=pair"),
        *("--rdzv-conf=join_timeout=60,last_call_timeout=1", "--ft-node-beat=0.5", "--ft-node-timeout=600"),
    )
    host = start_job(Plan(hold=4), WORLD // 2, *flags, name="host")
    host.until(lambda: host.listening({port}), "its store")
    other = start_job(Plan(hold=4), WORLD // 2, *flags, name="other")
    host.until(lambda: host.trained(3, 0, WORLD), "the ranks to come to iteration 4")
    for node in (host, other):
        found = node.until(lambda node=node: all_stacks(node), "the stacks of all ranks")  # type: ignore[misc]
        assert found["silent"] == [] and found["problem"] == ""
    (place,) = {line["node_rank"] for line in other.journal("cycle_start")}
    named = rf"no answer in time from \S+ \(node {place}\)"
    stacks_while_it_stands_still(other, asked=host, note=named)
    named = "the ranks of this node only: the rendezvous' store does not answer"
    stacks_while_it_stands_still(host, asked=other, note=named)
    host.go()
    assert [node.finish(120) for node in (host, other)] == [0, 0], host.tail() + other.tail()


def test_each_node_shows_where_all_ranks_are_over_etcd(start_job: StartJob) -> None:
    with running_etcd() as etcd:
        flags = (
            *("--nnodes=2", "--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=pair"),
            *("--rdzv-conf=join_timeout=60,last_call_timeout=1", "--ft-node-beat=0.5", "--ft-node-timeout=600"),
        )
        nodes = [start_job(Plan(hold=4), WORLD // 2, *flags, name=name) for name in ("one", "other")]
        nodes[0].until(lambda: nodes[0].trained(3, 0, WORLD), "the ranks to come to iteration 4")
        for node in nodes:
            found = node.until(lambda node=node: all_stacks(node), "the stacks of all ranks")  # type: ignore[misc]
            assert found["silent"] == [] and found["problem"] == ""
        with top(nodes[0]) as screen:
            screen.until("a of all nodes")
            nodes[0].until(lambda: shows_all_stacks(screen), "the stacks of all ranks on the screen")
            screen.press("q")
            assert screen.finish() == 0
        nodes[0].until(lambda: any(status(node)["other_nodes"] for node in nodes), "the coordinator to show the other")
        nodes[0].go()
        assert [node.finish(120) for node in nodes] == [0, 0], nodes[0].tail() + nodes[1].tail()


def stacks_of(job: Job) -> dict[str, Any]:
    done = command(job, "stacks", "pair", "--all-nodes", "--json")
    assert done.returncode == 0, done
    return dict(json.loads(done.stdout))


def ranks_with_frames(found: dict[str, Any]) -> set[int]:
    return {rank for group in found["groups"] if group["frames"] for rank in group["ranks"]}


def all_stacks(job: Job) -> dict[str, Any] | None:
    """What `stacks --all-nodes` says where it has frames of all ranks; on a busy machine some may be late."""
    found = stacks_of(job)
    return found if ranks_with_frames(found) == set(range(WORLD)) else None


def shows_all_stacks(screen: Terminal) -> bool:
    """Asks for them, and waits for the answer. Now and then one rank is at another line than the others."""
    screen.press("a")
    return f"ranks 0-{WORLD - 1}:" in screen.until("worker.py:")


def stacks_while_it_stands_still(still: Job, asked: Job, note: str) -> None:
    """Waits until `stacks --all-nodes`, while the launcher of the other node is stopped, has the ranks of the node that
    is asked, and only these, and says why."""
    os.kill(still.process.pid, signal.SIGSTOP)
    try:
        asked.until(lambda: ranks_with_frames(stacks_of(asked)) == global_ranks(asked), "the stacks of its own ranks")
        asked.until(lambda: re.search(note, command(asked, "stacks", "pair", "--all-nodes").stderr), "its note")
    finally:
        os.kill(still.process.pid, signal.SIGCONT)


def test_the_coordinator_shows_the_ranks_of_all_nodes(start_job: StartJob) -> None:
    """While somebody looks, as a page does; and what it knew last of a node whose launcher stands still."""
    port, status_port = free_port(), free_port()
    flags = (
        *("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=pair"),
        *("--rdzv-conf=join_timeout=60,last_call_timeout=1", "--ft-node-beat=0.5", "--ft-node-timeout=600"),
    )
    host = start_job(Plan(hold=4), WORLD // 2, *flags, f"--ft-status-port={status_port}", name="host")
    host.until(lambda: host.listening({port}), "its store")
    other = start_job(Plan(hold=4), WORLD // 2, *flags, name="other")
    host.until(lambda: host.trained(3, 0, WORLD), "the ranks to come to iteration 4")

    def seen() -> dict[str, Any]:
        (node,) = json.loads(get(status_port, "/status.json")[1])["other_nodes"]
        return dict(node)

    def theirs() -> list[dict[str, Any]]:
        return [rank for rank in seen()["ranks"] if rank["iteration"] == 3]

    ranks = host.until(lambda: len(found := theirs()) == WORLD // 2 and found, "the ranks of the other node")
    assert {rank["rank"] for rank in ranks} == global_ranks(other)
    assert {rank["pid"] for rank in ranks} == {
        rank["pid"] for line in other.journal("cycle_start") for rank in line["ranks"]
    }
    assert {rank["state"] for rank in ranks} == {"training"}
    assert status(other)["other_nodes"] is None
    os.kill(other.process.pid, signal.SIGSTOP)
    try:
        host.until(lambda: (seen()["age_s"] or 0.0) > 10, "what is known to be old")
    finally:
        os.kill(other.process.pid, signal.SIGCONT)
    host.go()
    assert [node.finish(120) for node in (host, other)] == [0, 0], host.tail() + other.tail()


def test_a_spare_is_ready(start_job: StartJob) -> None:
    """It knows from the coordinator's record that the others run without it."""
    port, status_port = free_port(), free_port()
    flags = (
        *("--nnodes=1", "--ft-spares=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=pair"),
        *("--rdzv-conf=join_timeout=60,last_call_timeout=1", "--ft-node-beat=0.5", "--ft-node-timeout=600"),
    )
    host = start_job(Plan(hold=4), 1, *flags, name="host")
    host.until(lambda: host.trained(3, 0, 1), "the rank to come to iteration 4")
    spare = start_job(Plan(hold=4), 1, *flags, f"--ft-status-port={status_port}", name="spare")
    spare.until(lambda: spare.journal("job_start") and status(spare)["state"] == "waiting", "the spare to wait")
    assert get(status_port, "/readyz") == (200, "ok\n")
    host.until(lambda: status(host)["waiting_nodes"], "the coordinator to name it")
    host.go()
    assert [node.finish(120) for node in (host, spare)] == [0, 0], host.tail() + spare.tail()
