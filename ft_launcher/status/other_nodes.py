"""What the other nodes of a job say of their ranks, as those who answer requests see it. Knows no store.

`agent/job_nodes.py` asks them. Where a launcher has none, its node is alone, or its rendezvous is not ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ft_launcher.status.node_status import RankReading


@dataclass(frozen=True)
class SilentNode:
    """A node that did not answer in time."""

    node_rank: int
    node: str


@dataclass(frozen=True)
class OtherStacks:
    """Where the ranks of the other nodes are.

    Attributes:
        problem: why nobody could be asked; empty: they were.
    """

    readings: Sequence[RankReading] = ()
    silent: Sequence[SilentNode] = ()
    problem: str = ""


class OtherNodes(Protocol):
    """Asks the other nodes. Any thread may call its methods."""

    def ask_stacks(self) -> Callable[[], OtherStacks]:
        """Asks where their ranks are, and returns at once. The function that it returns waits for the answers, for a
        bounded time."""
