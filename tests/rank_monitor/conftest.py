"""A node to play with, whatever a test does to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rank_monitor.contract.processes.spawn import Template
from tests.rank_monitor.node import TAG, Node, playing


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Template]:
    """One for all tests that do not harm it."""
    started = Template.start(TAG, Path(tmp_path_factory.mktemp("runtime")))
    yield started
    assert started.alive
    started.close()


@pytest.fixture
def node(template: Template) -> Iterator[Node]:
    """A launcher of one rank, in a folder of its own."""
    template.changes()
    with playing(template) as played:
        yield played
