"""The node agent: whom its cycle loop asks, when it wakes, which ending stands; and the numbers of its ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import Worker, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from ft_launcher.agent.cycle.cycle import CyclePhase, Event, RankEnded
from ft_launcher.agent.event_source import EventSource
from ft_launcher.agent.node_agent import NodeAgent, run_cycle
from ft_launcher.job.coordinator.node_messages import Reply
from tests.ft_launcher.job.nodes_of_a_test import coordinator, node


class Source(EventSource):
    """A source with a pipe: `bring` makes it readable, and the next `poll` returns these events."""

    def __init__(self, check: float | None = None) -> None:
        self.reader, self.writer = os.pipe()
        self.check = check
        self.events: list[Event] = []
        self.polled: list[bool] = []

    def bring(self, *events: Event) -> None:
        self.events += events
        os.write(self.writer, b"x")

    def descriptors(self) -> set[int]:
        return {self.reader}

    def next_check(self) -> float | None:
        return self.check

    def poll(self, ready: Set[int]) -> list[Event]:
        self.polled.append(self.reader in ready)
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def sources() -> Iterator[list[Source]]:
    made = [Source(), Source()]
    yield made
    for source in made:
        source.close()


def test_every_source_is_polled_when_one_is_readable(sources: list[Source]) -> None:
    sources[1].bring(RankEnded(0, 0))
    assert run_cycle(1, sources) is CyclePhase.SUCCEEDED
    assert [source.polled for source in sources] == [[False], [True]]


def test_the_ending_of_the_first_source_stands(sources: list[Source]) -> None:
    sources[1].bring(RankEnded(0, 1))
    sources[0].bring(CyclePhase.SIGNALLED)
    assert run_cycle(1, sources) is CyclePhase.SIGNALLED


def test_a_check_that_is_due_wakes_the_loop_without_a_descriptor(sources: list[Source]) -> None:
    sources[0].check = 0.0
    sources[0].events = [CyclePhase.CUT_OFF]
    assert run_cycle(1, sources) is CyclePhase.CUT_OFF
    assert [source.polled for source in sources] == [[False], [False]]


def test_it_goes_on_until_all_ranks_have_ended(sources: list[Source]) -> None:
    sources[0].bring(RankEnded(0, 0))
    sources[1].check = 0.0
    ends = iter([[], [], [RankEnded(1, 0)]])
    sources[1].poll = lambda ready: next(ends)  # type: ignore[method-assign]
    assert run_cycle(2, sources) is CyclePhase.SUCCEEDED
    assert len(sources[0].polled) == 3


def numbers(worker: Worker) -> tuple[int, ...]:
    return worker.local_rank, worker.global_rank, worker.role_rank, worker.world_size, worker.role_world_size


@pytest.mark.parametrize(
    "nodes",
    [
        [(2, "trainer")],
        [(2, "trainer"), (2, "trainer")],
        [(2, "trainer"), (1, "reader"), (4, "trainer"), (3, "reader")],
    ],
)
def test_ranks_have_the_numbers_that_torchs_agents_agree_on(nodes: list[tuple[int, str]]) -> None:
    store, machine, work = HashStore(), coordinator(len(nodes), len(nodes)), []
    for name, (nprocs, role) in enumerate(nodes):
        work += machine.on(node(str(name), nprocs=nprocs, role=role), 0.0)
    places = [one.answer for one in work if isinstance(one, Reply)]
    specs = [WorkerSpec(role, nprocs, SimpleNamespace(), entrypoint="python") for nprocs, role in nodes]  # type: ignore[arg-type]

    def torchs(rank: int) -> list[Any]:
        agent: Any = LocalElasticAgent.__new__(LocalElasticAgent)
        return list(map(numbers, agent._assign_worker_ranks(store, rank, len(nodes), specs[rank])))

    def ours(rank: int) -> list[Any]:
        agent: Any = NodeAgent.__new__(NodeAgent)
        agent._rdzv_handler = SimpleNamespace(numbers_ranks=True, place=places[rank])
        return list(map(numbers, agent._assign_worker_ranks(HashStore(), rank, len(nodes), specs[rank])))

    with ThreadPoolExecutor(len(nodes)) as pool:
        assert [ours(rank) for rank in range(len(nodes))] == list(pool.map(torchs, range(len(nodes))))
