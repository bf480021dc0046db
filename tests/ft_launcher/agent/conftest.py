"""The store of the ranks, for the tests of what agents write into it."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from tests.patience import patient


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=patient(20.0)))
