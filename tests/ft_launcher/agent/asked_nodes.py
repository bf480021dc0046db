"""The nodes of a job that ask each other through a store which is a dictionary, each with its place in the cycle."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from ft_launcher.nodes.node_messages import Members, RankAssigned
from ft_launcher.nodes.questions import Topic


class AskedNodes:
    """Stands for the store, and for `Questions` of every node."""

    look_s = 0.01

    def __init__(self, members: Members) -> None:
        self.current = members
        self.asked = dict.fromkeys(Topic, 0)
        self.written: dict[tuple[Topic, int], bytes] = {}

    def ask(self, topic: Topic) -> int:
        self.asked[topic] += 1
        return self.asked[topic]

    def answer(self, topic: Topic, rank: int, text: str) -> None:
        self.written[topic, rank] = text.encode()

    def answers(self, topic: Topic, ranks: Iterable[int]) -> dict[int, bytes]:
        return {rank: self.written[topic, rank] for rank in ranks if (topic, rank) in self.written}

    def members(self) -> Members:
        return self.current

    def rendezvous(self, rank: int | None, cycle: int = 0) -> Any:
        """That of the node with this node rank; None: it waits for a place."""
        place = None
        if rank is not None:
            place = RankAssigned(cycle, rank, 2, "")
        return SimpleNamespace(questions=self, place=place, current_place=place, members=self.members)
