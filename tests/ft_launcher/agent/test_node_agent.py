"""The cycle loop of the node agent: which source it asks, when it wakes, and which ending stands."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set

import pytest

from ft_launcher.agent.cycle.cycle import CyclePhase, Event, RankEnded
from ft_launcher.agent.event_source import EventSource
from ft_launcher.agent.node_agent import run_cycle


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


def test_every_source_is_attended_when_one_is_readable(sources: list[Source]) -> None:
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
