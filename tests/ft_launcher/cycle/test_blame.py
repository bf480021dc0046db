"""Who is blamed for an interruption in process: only by answers that were sent before it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from ft_launcher.attribution import RankEvidence
from ft_launcher.cycle.blame import BlameOfInterruption
from ft_launcher.ranks.monitors import Found, NodeMonitors
from rank_monitor.contract.wire.launcher_messages import Snapshot
from rank_monitor.contract.wire.messages import Restarter

WAITS = ["torch/distributed/distributed_c10d.py:3252 in all_reduce", "train.py:20 in step"]
LOADS = ["train.py:9 in load"]


@dataclass
class FakeMonitors:
    """Answers of three ranks, of which rank 1 does not come to the fourth collective."""

    asked: int = 0
    ranks: list[Found] = field(default_factory=lambda: [Found() for _ in range(3)])

    @property
    def local_ranks(self) -> range:
        return range(len(self.ranks))

    def found(self, local_rank: int) -> Found:
        return self.ranks[local_rank]

    def ask_readings(self, stacks: bool = False) -> int:
        self.asked += 1
        return -self.asked

    def answer(self, *local_ranks: int) -> None:
        for local_rank in local_ranks:
            state: dict[str, Any] = {"entered": 4, "finished": 3, "operation": "all_reduce"}
            frames = WAITS
            if local_rank == 1:
                state, frames = state | {"entered": 3}, LOADS
            found = self.ranks[local_rank]
            found.reading = Snapshot(-1, True, True, 7, {}, 0.1, frames=frames, groups={"0": state})
            found.reading_sent_ns = time.monotonic_ns()

    def interrupt(self, local_rank: int) -> None:
        self.ranks[local_rank].interrupted_ns = time.monotonic_ns()


@pytest.fixture
def monitors() -> FakeMonitors:
    return FakeMonitors()


@pytest.fixture
def blames(monitors: FakeMonitors) -> BlameOfInterruption:
    made = BlameOfInterruption(cast("NodeMonitors", monitors))
    made.heard(Restarter("handling_completed", 0, 2, "call/", 10.0))
    return made


RANKS = [RankEvidence(rank, rank, 100 + rank) for rank in range(3)]


def test_who_held_up_the_others(monitors: FakeMonitors, blames: BlameOfInterruption) -> None:
    now = time.monotonic()
    blames.ask(now)
    blames.ask(now + 0.01)
    assert monitors.asked == 1
    monitors.answer(0, 1, 2)
    assert not blames.is_due(now) and blames.next_check() is None
    monitors.interrupt(0)
    blames.interrupted(now)
    assert blames.is_due(now)
    blames.heard(Restarter("handling_completed", 0, 3, "call/", 10.0))  # it was quick
    found = blames.find(RANKS)
    assert found is not None
    prefix, iteration, blame, text = found
    assert (prefix, iteration, blame.ranks, blame.waiting) == ("call/", 2, (1,), (0, 2))
    assert text == "rank 1 never entered all_reduce 4 of group 0, and 2 ranks wait for it; it is at train.py:9 in load"
    assert not blames.is_due(now + 1.0)


def test_an_answer_after_the_interruption_says_nothing(monitors: FakeMonitors, blames: BlameOfInterruption) -> None:
    """Its rank may have been interrupted already, and be outside of all collectives."""
    now = time.monotonic()
    blames.ask(now)
    monitors.answer(0, 1)
    monitors.interrupt(2)
    blames.interrupted(now)
    monitors.answer(2)
    assert not blames.is_due(now)
    assert blames.is_due(now + 0.5)
    assert blames.find(RANKS) is None


def test_an_answer_to_an_earlier_question_says_nothing(monitors: FakeMonitors, blames: BlameOfInterruption) -> None:
    monitors.answer(0, 1, 2)
    now = time.monotonic()
    blames.interrupted(now + 10.0)  # nobody was asked
    assert blames.next_check() is None
    blames.ask(now)
    monitors.interrupt(0)
    blames.interrupted(now)
    assert blames.is_due(now + 0.5)
    assert blames.find(RANKS) is None


def test_it_is_said_once_for_an_iteration(monitors: FakeMonitors, blames: BlameOfInterruption) -> None:
    now = time.monotonic()
    blames.ask(now)
    monitors.answer(0, 1, 2)
    monitors.interrupt(0)
    blames.interrupted(now)
    assert blames.find(RANKS) is not None
    blames.interrupted(now + 0.01)
    assert blames.next_check() is None


def test_one_rank_waits_for_nobody(monitors: FakeMonitors, blames: BlameOfInterruption) -> None:
    del monitors.ranks[1:]
    now = time.monotonic()
    blames.ask(now)
    monitors.answer(0)
    monitors.interrupt(0)
    blames.interrupted(now)
    assert blames.find(RANKS[:1]) is None
