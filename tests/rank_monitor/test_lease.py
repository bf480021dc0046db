"""A monitor ends its rank with the node's lease. A pipe that can be read stands for a timer that has run out."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from rank_monitor.contract import env
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.launcher_messages import Fenced, Ready, Times
from tests.rank_monitor.node import TAG, Node, Puppet, ended, playing


@pytest.fixture
def lease() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def fork_monitor(node: Node, lease: int) -> None:
    """One more monitor, with a lease."""
    node.monitors.append(node.template.fork_monitor(node.listener, MonitorSettings(), 0, lease))
    node.hear(Ready)


def puppet(node: Node, cycle: int) -> Puppet:
    """A process of the job in a cycle."""
    node.puppets.append(Puppet(TAG, **{env.CYCLE: str(cycle)}))
    return node.puppets[-1]


def ends_with_its_lease(node: Node, lease: tuple[int, int]) -> None:
    """Also where the rank was stopped; the agent is told first. What is of another cycle stays."""
    fork_monitor(node, lease[0])
    rank, child, other = puppet(node, 1), puppet(node, 1), puppet(node, 2)
    node.watched(rank)
    os.kill(rank.pid, signal.SIGSTOP)
    os.write(lease[1], b"!")
    assert node.hear(Fenced) == Fenced(cycle=1, rank=5)
    assert (rank.wait(), child.wait()) == (-signal.SIGKILL, -signal.SIGKILL)
    assert other.do("close") == "closed"


def test_the_rank_and_all_of_its_cycle_end_with_it(node: Node, lease: tuple[int, int]) -> None:
    ends_with_its_lease(node, lease)


def test_a_monitor_that_was_started_by_itself_has_it_too(lease: tuple[int, int]) -> None:
    with playing() as node:
        node.template.close()
        ends_with_its_lease(node, lease)


def test_a_rank_that_starts_when_it_is_over_ends_too(node: Node, lease: tuple[int, int]) -> None:
    fork_monitor(node, lease[0])
    os.write(lease[1], b"!")
    rank = node.start(puppet(node, 1))
    assert node.hear(Fenced) == Fenced(cycle=1, rank=5)
    assert rank.wait() == -signal.SIGKILL
    node.hear(Times)  # from now on the monitor takes no connection for one of the rank that has ended
    os.read(lease[0], 1)  # the launcher has begun another
    node.watched(puppet(node, 2))
    assert not ended(node.monitors[-1].pidfd, 0.0)
