"""A node leaves a job whose store does not answer: a signal ends its launcher all the same, and the outcome stays."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.etcd_server import running_etcd
from tests.faults.job import kill
from tests.faults.training import Plan
from tests.nodes import lone_worker
from tests.nodes.agents import Agent, Agents
from tests.nodes.conftest import StartAgents

# A launcher that waited for the store, or until this node counts as lost, would exceed the time limit of the test.
NEVER_LOST = ("--ft-node-timeout=3600", "--ft-node-beat=0.5")
PREEMPTED = 86
LIMIT_S = 60


@contextmanager
def over_etcd(start: StartAgents, folder: Path, *flags: str) -> Iterator[tuple[Agents, Agent, Callable[[], None]]]:
    """A job whose only node coordinates; yields it, that node, and what has the store stand still."""
    with running_etcd() as etcd:
        conf = "--rdzv-conf=join_timeout=60,last_call_timeout=1"
        endpoint = ("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={folder.name}", conf)
        flags = ("--nnodes=1:2", *NEVER_LOST, *endpoint, *flags)
        agents = start(1, Plan(), *flags, nproc=1, script=Path(lone_worker.__file__))
        agents.until_cycle_of(1)
        yield agents, agents[0], etcd.pause


@contextmanager
def over_c10d(start: StartAgents, folder: Path, *flags: str) -> Iterator[tuple[Agents, Agent, Callable[[], None]]]:
    """The same with two nodes; the launcher of the other one hosts the store, and is lost at the end."""
    agents = start(2, Plan(), "--nnodes=2", *NEVER_LOST, *flags, nproc=1, script=Path(lone_worker.__file__))
    agents.until_cycle_of(2)
    host = agents[0]
    yield agents, agents[1], lambda: kill(host.process.pid, signal.SIGSTOP)
    agents.lose(host)


@pytest.mark.parametrize("over", [over_etcd, over_c10d])
def test_after_success(on_loopback: StartAgents, tmp_path: Path, over: Callable[..., object]) -> None:
    """The training is complete, so the signal is no failure."""
    with over(on_loopback, tmp_path) as (agents, node, silence):  # type: ignore[attr-defined]
        silence()
        (agents.folder / lone_worker.END).touch()
        node.until_event("rank_exit")
        node.process.send_signal(signal.SIGTERM)
        assert node.finish(LIMIT_S) == 0, agents.tail()


@pytest.mark.parametrize("over", [over_etcd, over_c10d])
def test_after_a_failure(on_loopback: StartAgents, tmp_path: Path, over: Callable[..., object]) -> None:
    """The node waits for what the coordinator decides."""
    with over(on_loopback, tmp_path, "--max-restarts=3") as (agents, node, silence):  # type: ignore[attr-defined]
        silence()
        for pid in node.ranks_alive(0):
            kill(pid)
        node.until_event("rank_exit")
        node.process.send_signal(signal.SIGTERM)
        assert node.finish(LIMIT_S) == PREEMPTED, agents.tail()
