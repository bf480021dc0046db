"""Makes networks, and jobs of several nodes in them or on this machine; ends what a failed test left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.faults.training import Plan
from tests.nodes import clock, netns
from tests.nodes.agents import Agents
from tests.nodes.job_site import Site
from tests.nodes.slow_proxy import Line


class StartAgents(Protocol):
    """Starts `count` agents of a job with `flags`, each on a node of its own, with `nproc` ranks.

    `Site` explains `line`, `store_apart`, `own_clocks`; `more` is as for `Job`.
    """

    def __call__(
        self,
        count: int,
        plan: Plan,
        *flags: str,
        nproc: int = 2,
        line: Line | None = None,
        store_apart: bool = False,
        own_clocks: tuple[int, ...] = (),
        **more: Any,
    ) -> Agents: ...


def require(why_not: str) -> None:
    """Skips a test that cannot run here, for the reason given, if one is; where `CI` is set it fails."""
    if why_not and os.environ.get("CI"):
        pytest.fail(why_not)
    if why_not:
        pytest.skip(why_not)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[netns.Network]:
    """A network without nodes."""
    require(netns.unavailable())
    with netns.Network(tmp_path) as network:
        yield network


@pytest.fixture
def on_nodes(network: netns.Network, tmp_path: Path) -> Iterator[StartAgents]:
    """A function that starts a job whose nodes are network namespaces. After the test nothing may be left (I1)."""
    with _starting(tmp_path, network) as start:
        yield start


@pytest.fixture
def on_loopback(tmp_path: Path) -> Iterator[StartAgents]:
    """The same with all agents on this machine."""
    with _starting(tmp_path, None) as start:
        yield start


@contextmanager
def _starting(folder: Path, network: netns.Network | None) -> Iterator[StartAgents]:
    jobs: list[Agents] = []

    def start(
        count: int,
        plan: Plan,
        *flags: str,
        nproc: int = 2,
        line: Line | None = None,
        store_apart: bool = False,
        own_clocks: tuple[int, ...] = (),
        **more: Any,
    ) -> Agents:
        if own_clocks:
            require(clock.unavailable())
        jobs.append(Agents(folder, plan, flags, Site(folder, network, line, store_apart, own_clocks), **more))
        for _ in range(count):
            jobs[-1].join(nproc=nproc)
        return jobs[-1]

    try:
        yield start
        for job in jobs:
            job.nothing_left()
    finally:
        for job in jobs:
            job.kill_all()
