"""Real ranks, and the store as another rank sees it."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from tests.client.inprocess.nursery import Nursery, nursery
from tests.ports import free_port

WAIT = datetime.timedelta(seconds=60)


@pytest.fixture(scope="session")
def _nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery(tmp_path_factory.mktemp("tmp")) as made:
        yield made


@pytest.fixture
def ranks(_nursery: Nursery) -> Iterator[Nursery]:
    """Where ranks come from; nothing of them is left."""
    yield _nursery
    _nursery.nothing_left()


@pytest.fixture
def port() -> int:
    """A port that nobody listens at now."""
    return free_port()


@pytest.fixture
def server() -> Any:
    """A store that the test hosts."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=WAIT)


def connection(port: int, prefix: str = "call") -> Any:
    """Another rank's view of a call's store."""
    return PrefixStore(prefix, TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=WAIT))
