"""A node to play with, whatever a test does to it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rank_monitor.contract.sweep import sweep
from tests.rank_monitor.node import TAG, Node


@pytest.fixture
def node() -> Iterator[Node]:
    """A launcher of one rank, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="ft-", ignore_cleanup_errors=True) as name:
        played = Node(Path(name))
        yield played
        played.end()
        assert sweep(TAG) == []
