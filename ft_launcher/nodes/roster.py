"""The nodes of a job as its coordinator knows them: members of the last cycle, those that wait, who is away. Pure.

Knows no phase, no time and no rules: what follows is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

from ft_launcher.nodes.messages import NO_CYCLE, Arrive, Formed, How, arrivals_of

_NOT_BACK = (How.LEFT, How.LOST, How.PREEMPTED)


class Roster:
    """Their arrivals by node: `members` by rank in cycle number `cycle`, `waiting` in the order they came.

    `away` are members that are gone or failed, `done` those that succeeded; `failed` said so themselves, in this order.
    """

    def __init__(self, former: Formed | None) -> None:
        self.cycle = NO_CYCLE
        self.members: dict[str, Arrive] = {}
        self.waiting: dict[str, Arrive] = {}
        if former is not None:
            self.cycle, self.waiting = former.cycle, arrivals_of(former)
            self.members = {node: self.waiting.pop(node) for node in former.members}
        self.away: dict[str, How] = {}
        self.done: set[str] = set()
        self.failed: list[str] = []

    @property
    def living(self) -> dict[str, Arrive]:
        """The members that are not away."""
        return {node: came for node, came in self.members.items() if node not in self.away}

    @property
    def not_gone(self) -> set[str]:
        """The members that are there, or will be back."""
        return {node for node in self.members if self.away.get(node) not in _NOT_BACK}

    @property
    def complete(self) -> bool:
        """Whether all living members wait for the next cycle."""
        return all(node in self.waiting or node in self.away for node in self.members)

    @property
    def succeeded(self) -> bool:
        """Whether all that did not get away are done."""
        return bool(self.done) and self.members.keys() <= self.done | self.away.keys()

    def lives(self, node: str) -> bool:
        """Whether it is a member and not away."""
        return node in self.members and node not in self.away

    def present(self) -> Iterable[Arrive]:
        """Whoever waits, and the living members."""
        return chain(self.waiting.values(), self.living.values())

    def has(self, came: Arrive) -> bool:
        """Whether this came before, or a later one of the node: it is sent twice where the store's answer was lost."""
        known = self.members.get(came.node), self.waiting.get(came.node)
        return any(earlier is not None and came.seq <= earlier.seq for earlier in known)

    def faults(self) -> dict[str, dict[str, Any]]:
        """Those that were brought from the last cycle, by node, the first to tell of one first."""
        told = [node for node in self.failed if node in self.waiting]
        brought = [node for node, came in self.waiting.items() if came.fault and came.cycle == self.cycle]
        return {node: self.waiting[node].fault for node in told + brought}

    def end(self) -> None:
        """The cycle has ended."""
        self.away = {node: how for node, how in self.away.items() if how in _NOT_BACK}
        self.done = set()

    def form(self, members: Iterable[Arrive]) -> None:
        """These, by rank, are the next cycle; the others wait on."""
        self.cycle += 1
        self.members = {came.node: replace(came, fault={}) for came in members}
        self.waiting = {node: came for node, came in self.waiting.items() if node not in self.members}
        self.away, self.failed = {}, []
