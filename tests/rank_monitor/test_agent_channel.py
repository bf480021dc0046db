"""Garbage on the channel between agent and monitor: the monitor refuses it, says so, and goes on watching."""

from __future__ import annotations

import os
import time

import pytest

from rank_monitor.contract.wire.launcher_messages import CycleStart, Snapshot, SnapshotRequest, Verdict
from rank_monitor.contract.wire.messages import Sections
from tests.faults.hostile import messages
from tests.rank_monitor.node import Node, bytes_of
from tests.rank_monitor.timeline import limited
from tests.restart_reports import report

BYE = b"\x33"  # a good one ends the monitor, as it should
SETTINGS = limited(rank_section_timeouts={"step": 0.3}, stall_warning=600.0)


def ill_advised() -> list[bytes]:
    """Messages that are well formed, with values that make no sense."""
    now_ns = time.monotonic_ns()
    starts = [
        CycleStart(cycle=1, rank=0, rank_pid=pid, started_ns=now_ns, stack_file="\0" * 9)
        for pid in (-1, 0, 1 << 31, 1 << 62)
    ]
    starts.append(CycleStart(1, 0, os.getpid(), -1, "", reconnect=True, attached=True, limits={"initial": "x"}))
    return [bytes_of(message) for message in (*starts, SnapshotRequest(-1), report("running", -1.0, 0.0, 0.0))]


@pytest.mark.parametrize("kind", ["nonsense", "values"])
def test_garbage_from_the_agent_ends_no_monitor(node: Node, kind: str) -> None:
    monitor = node.monitor(SETTINGS)
    garbage = [data for data in messages() if data[1:2] != BYE] if kind == "nonsense" else ill_advised()
    monitor.channel.setblocking(True)
    for data in garbage:
        monitor.channel.send(data)
    monitor.channel.send(bytes_of(SnapshotRequest(7)))
    monitor.channel.setblocking(False)
    while node.hear(Snapshot).token != 7:
        pass
    rank = node.watched()
    rank.say(Sections((("step", time.monotonic_ns()),), 7))
    rank.order("hang_in_sleep")
    assert node.hear(Verdict).limit == "section:step"
