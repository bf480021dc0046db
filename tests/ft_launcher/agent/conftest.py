"""The store of the ranks, for the tests of what agents write into it."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from tests.patience import patient


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=patient(20.0)))


@pytest.fixture(autouse=True)
def _no_thread_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that connects when its test drops the store goes on for 20 s, and aborts pytest's worker if that ends then.

    Where no resolver answers, a connection takes a second, which is more than the end of a cycle waits for.
    """
    monkeypatch.setattr("ft_launcher.agent.in_process.store_threads.THREAD_ENDS_S", patient(3.0))
