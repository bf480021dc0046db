"""What the launcher records of copies, cycle by cycle."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from ft_launcher.agent.state_copies import StateCopies
from ft_launcher.record.events import StatesCopiedEvent
from rank_monitor.contract.copy_records import COPIED, FETCHED, NOT_COPIED, CopyNews, CopyOffer, CopyPeer, CopyPlan

INTERRUPT = os.pipe()[0]
NODES: Any = SimpleNamespace(descriptors=lambda: {8}, has_ended=lambda: False)


class Process:
    """The process for copies: what it has said, and what it was told."""

    def __init__(self) -> None:
        self.refused = ""
        self.said: list[CopyNews] = []
        self.fetched: CopyNews | None = None
        self.told: list[tuple[CopyPlan, Any, str]] = []
        self.lives = True

    def offer(self) -> CopyOffer:
        return CopyOffer(1, 1)

    def begin(self, plan: CopyPlan, wakers: Any, why_not: Any) -> CopyNews | None:
        self.told.append((plan, wakers, why_not()))
        return self.fetched

    def news(self) -> list[CopyNews]:
        said, self.said = self.said, []
        return said

    def descriptors(self) -> set[int]:
        return {5} if self.lives else set()


class Recorder:
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.ranks: Any = None
        self.fetches: list[tuple[int, CopyNews]] = []
        self.refusals: list[tuple[Any, ...]] = []
        self.copies: list[StatesCopiedEvent] = []

    def fetched(self, cycle: int, news: CopyNews) -> None:
        self.fetches.append((cycle, news))

    def not_copied(self, *facts: Any) -> None:
        self.refusals.append(facts)

    def copied(self, event: StatesCopiedEvent) -> None:
        self.copies.append(event)


class Ranks:
    """The ranks of a node, and what is known of their state."""

    def __init__(self, parts: Any) -> None:
        self.parts, self.cycle = parts, 3
        self.state = SimpleNamespace(copied=None)


def made(process: Process | None) -> tuple[StateCopies, Recorder]:
    recorder = Recorder()
    parts = SimpleNamespace(
        state_in_memory=SimpleNamespace(copies=process),
        recorder=SimpleNamespace(memory=recorder),
        signals=SimpleNamespace(fileno=lambda: INTERRUPT),
    )
    recorder.ranks = Ranks(parts)
    return StateCopies(recorder.ranks), recorder  # type: ignore[arg-type]


def copied(step: int, took_s: float, peer: str = "n1") -> CopyNews:
    return CopyNews(COPIED, step=step, size=step * 10, took_s=took_s, peer=peer)


def refused(step: int, reason: str, peer: str = "n1") -> CopyNews:
    return CopyNews(NOT_COPIED, step=step, peer=peer, reason=reason)


def test_without_the_option_nothing_is_done_or_said() -> None:
    copies, recorder = made(None)
    copies.begin(CopyPlan(), NODES)
    assert copies.offer() is None
    assert list(copies.poll(set())) == []
    copies.cycle_over()
    assert copies.descriptors() == set()
    assert recorder.fetches == recorder.refusals == recorder.copies == []


def test_a_plan_is_passed_on_and_what_is_fetched_recorded() -> None:
    process = Process()
    copies, recorder = made(process)
    assert copies.offer() == CopyOffer(1, 1)
    copies.begin(CopyPlan(), NODES)
    assert recorder.fetches == []
    process.fetched = CopyNews(FETCHED, step=5)
    copies.begin(CopyPlan(), NODES)
    assert process.told == [(CopyPlan(), {INTERRUPT, 8}, "")] * 2
    assert recorder.fetches == [(3, CopyNews(FETCHED, step=5))]
    over: Any = SimpleNamespace(descriptors=set, has_ended=lambda: True)
    copies.begin(CopyPlan(), over)
    assert process.told[2] == (CopyPlan(), {INTERRUPT}, "the cycle has ended on another node")


def test_copies_are_summed_up_for_each_node_once_the_cycle_is_over() -> None:
    process = Process()
    copies, recorder = made(process)
    copies.begin(CopyPlan(), NODES)
    process.said = [copied(5, 0.5), copied(5, 0.1, "n2")]
    assert list(copies.poll({5})) == []
    process.said = [copied(10, 0.25)]
    copies.cycle_over()
    expected = [StatesCopiedEvent(3, "n1", 10, 2, 100, 0.75), StatesCopiedEvent(3, "n2", 5, 1, 50, 0.1)]
    assert recorder.copies == expected
    copies.cycle_over()
    assert recorder.copies == expected, "once"


def test_a_step_counts_as_copied_once_each_buddy_has_it() -> None:
    process = Process()
    copies, recorder = made(process)
    copies.begin(CopyPlan(2, [CopyPeer("n1", "", 1), CopyPeer("n2", "", 1)]), NODES)
    seen = []
    for news in (copied(5, 0.1), copied(5, 0.1, "n2"), copied(10, 0.1), copied(15, 0.1, "n2")):
        process.said = [news]
        copies.poll({5})
        seen.append(recorder.ranks.state.copied)
    assert seen == [None, 5, 5, 10]
    copies.begin(CopyPlan(), NODES)
    assert recorder.ranks.state.copied is None


@pytest.mark.parametrize("begins_again", [False, True])
def test_one_line_for_each_node_and_reason_in_a_cycle(begins_again: bool) -> None:
    process = Process()
    copies, recorder = made(process)
    copies.begin(CopyPlan(), NODES)
    process.said = [refused(5, "no room for 5 MiB"), refused(5, "no room for 5 MiB", "n2"), refused(5, "it is gone")]
    copies.poll({5})
    if begins_again:
        copies.begin(CopyPlan(), NODES)
    process.said = [refused(10, "no room for 6 MiB")]
    copies.poll({5})
    again = [(3, 10, "n1", "no room for 6 MiB")] if begins_again else []
    assert recorder.refusals == [
        (3, 5, "n1", "no room for 5 MiB"),
        (3, 5, "n2", "no room for 5 MiB"),
        (3, 5, "n1", "it is gone"),
        *again,
    ]


def test_a_process_that_dies_or_was_not_there_is_told_once() -> None:
    process = Process()
    copies, recorder = made(process)
    copies.begin(CopyPlan(), NODES)
    process.lives = False
    copies.poll({5})
    copies.poll({5})
    assert recorder.refusals == [(3, None, "", "its process has died; the next cycle has another one")]
    process.refused = "the system refuses a process"
    copies.begin(None, NODES)
    copies.poll(set())
    assert recorder.refusals[1:] == [(3, None, "", "the system refuses a process")]
