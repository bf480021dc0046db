"""A monitor to talk to, and a process as it is before anything of ours was started in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_client.rank.monitoring import process
from ft_client.rank_monitor_client import RankMonitorClient
from rank_monitor.contract import env
from tests.client.fake_monitor import FakeMonitor


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, no link, no client; what a test starts is ended."""
    for name in env.SET_FOR_RANKS | {env.STACK_SIGNAL}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process, "_link", None)
    monkeypatch.setattr(process, "_forked", False)
    monkeypatch.setattr(RankMonitorClient, "active", None)
    yield
    link = process.current()
    if link is not None:
        link.close_in_child()


@pytest.fixture
def monitor(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMonitor]:
    """A monitor of this process."""
    fake = FakeMonitor(tmp_path / "m0")
    monkeypatch.setenv(env.RANK_MONITOR_SOCKET, str(fake.path))
    yield fake
    fake.close()


@pytest.fixture
def client(monitor: FakeMonitor) -> RankMonitorClient:
    """A client that is watched."""
    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client
