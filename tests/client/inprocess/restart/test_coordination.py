"""Where the ranks of a call meet under a launcher: at a real store, which stands in for the agent's."""

from __future__ import annotations

import datetime
from functools import partial
from typing import Any

import pytest

from ft_client.inprocess.arguments import Arguments
from ft_client.inprocess.restart.coordination import meet
from ft_client.inprocess.state import State
from ft_client.inprocess.store import TCPStore
from rank_monitor.contract import env


def test_both_connections_are_to_the_launchers_store(server: Any, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the second one of a torch whose stores cannot be cloned (2.6), whatever the user says of host and port."""

    def clone(_: TCPStore) -> None:
        raise NotImplementedError

    monkeypatch.setattr(TCPStore, "clone", clone, raising=False)
    launched = {env.JOB_TAG: "tag", env.CYCLE: "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    for name, value in {**launched, "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    given = {"port": port, "timeout": datetime.timedelta(seconds=5)}
    arguments = Arguments(store_factory=TCPStore, store_kwargs=given, abort=None)
    coordination = meet(arguments, partial(TCPStore, **given), State(1, 2))
    coordination.watched.set("key", "value")
    assert coordination.store.get("key") == b"value"
    coordination.close()
