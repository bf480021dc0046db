"""A coordinator with its clock and what it told, as lines: so that a scenario reads like a report of an incident."""

from __future__ import annotations

from typing import Any

from ft_launcher.job.coordinator.coordinator import Coordinator
from ft_launcher.job.coordinator.node_messages import (
    NO_CYCLE,
    CycleEnd,
    Ended,
    EndReason,
    Formed,
    JobOver,
    Left,
    RankAssigned,
    RanksEnded,
    Reply,
    Work,
)
from tests.ft_launcher.job.nodes_of_a_test import judge, node, request, rules_of


class Story:
    """Nodes are single letters. Each method returns what was told by it, in order; `Formed` records are kept apart.

    `without_ranks`: of which node ranks it was told that their ranks have ended, in order.
    """

    def __init__(self, minimum: int, maximum: int, me: str = "a", **rules: Any) -> None:
        self.rules = rules_of(minimum, maximum, **rules)
        self.machine = Coordinator(me, self.rules, judge, 0.0)
        self.now = 0.0
        self.formed: Formed | None = None
        self.without_ranks = ""
        self.seq: dict[str, int] = {}
        self._cycle: dict[str, int] = {}

    def come(self, nodes: str, **fields: Any) -> list[str]:
        """They arrive, one after the other, each from the cycle it was in last."""
        lines = []
        for name in nodes:
            self.seq[name] = self.seq.get(name, 0) + 1
            arrival = node(name, self.seq[name], self._cycle.get(name, NO_CYCLE), **fields)
            lines += self.told(self.machine.on(arrival, self.now))
        return lines

    def ended(self, nodes: str, how: EndReason, action: str = "", cycle: int | None = None) -> list[str]:
        """Their part in the cycle they are in (or another) ended, or a rank of each asked for an action."""
        lines = []
        for name in nodes:
            asked = request(action) if action else None
            ended = Ended(name, self._cycle[name] if cycle is None else cycle, how, "boom", asked)
            lines += self.told(self.machine.on(ended, self.now))
        return lines

    def failed(self, nodes: str) -> list[str]:
        """A rank of theirs failed."""
        return self.ended(nodes, EndReason.FAILED)

    def asked(self, nodes: str, action: str, cycle: int | None = None) -> list[str]:
        """A rank of each asked for an action."""
        return self.ended(nodes, EndReason.ASKED, action, cycle)

    def left(self, name: str, signal: int = 0) -> list[str]:
        """A node says that it leaves, told to by a signal if one is given."""
        return self.told(self.machine.on(Left(name, "bye", signal), self.now))

    def lost(self, name: str) -> list[str]:
        """A node has been silent for too long."""
        return self.told(self.machine.on_lost(name, self.now))

    def wait(self, seconds: float) -> list[str]:
        """Time passes; ticks come when they are due."""
        lines, until = [], self.now + seconds
        while (due := self.machine.next_deadline()) is not None and due <= until:
            assert due > self.now, "a deadline in the past would be asked for ever"
            self.now = due
            lines += self.told(self.machine.on_tick(self.now))
        self.now = until
        return lines + self.told(self.machine.on_tick(self.now))

    def taken_over(self, by: str) -> list[str]:
        """Another node takes over from what was agreed on last, and writes that down."""
        assert self.formed is not None
        self.machine = Coordinator(by, self.rules, judge, self.now, self.formed)
        self.formed = self.machine.formed()
        return self.told(self.machine.resend())

    def told(self, work: list[Work]) -> list[str]:
        """What is told, as lines."""
        lines, members = [], dict[int, str]()
        for one in work:
            match one:
                case Formed():
                    self.formed = one
                case RanksEnded(_, rank):
                    self.without_ranks += str(rank)
                case CycleEnd():
                    lines.append(
                        f"end {one.cycle}: {one.reason.value}" + ("" if one.exit_code is None else f" {one.exit_code}")
                    )
                case Reply(name, seq, RankAssigned(cycle, rank, count)):
                    assert seq == self.seq[name]
                    members[rank], self._cycle[name] = name, cycle
                    if len(members) == count:
                        lines.append(f"cycle {cycle}: {''.join(members[rank] for rank in range(count))}")
                case Reply(name, seq, JobOver(code)):
                    assert seq == self.seq[name]
                    lines.append(f"over for {name}: {code}")
        return lines


def running(members: str = "abc", minimum: int | None = None, maximum: int | None = None, **rules: object) -> Story:
    """A story whose first cycle runs."""
    story = Story(minimum or len(members), maximum or len(members), **rules)
    told = story.come(members)
    assert (told or story.wait(30.0)) == [f"cycle 0: {members}"]
    return story
