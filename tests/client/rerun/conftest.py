"""Ranks that all tests here share, by the size of their world; made anew after a test that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ft_client.rerun import destroy_rerun_state_machine
from tests.client.rerun.ranks import Ranks

AlreadyThere = dict[int, Ranks]


@pytest.fixture(autouse=True)
def no_machine() -> Iterator[None]:
    yield
    destroy_rerun_state_machine()


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AlreadyThere]:
    there: AlreadyThere = {}
    yield there
    with ExitStack() as stack:
        for one in there.values():
            stack.callback(one.close)


@pytest.fixture
def ranks(
    groups: AlreadyThere, world_size: int, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Ranks]:
    if world_size not in groups:
        groups[world_size] = Ranks(tmp_path_factory.mktemp("group"), world_size)
    failed = request.session.testsfailed
    yield groups[world_size]
    if request.session.testsfailed > failed:
        groups.pop(world_size).close()
