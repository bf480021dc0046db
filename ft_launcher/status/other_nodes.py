"""What the other nodes of a job say of their ranks, as those who answer requests see it. Knows no store.

`agent/job_nodes.py` asks them. Where a launcher has none, its node is alone, or its rendezvous is not ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


@dataclass(frozen=True)
class NodeSeen:
    """What another node has said of its ranks.

    Attributes:
        age_s: how long ago that arrived (seconds); None: it has said nothing in this cycle.
        ranks: as `ranks` of `/status.json`, with the ages of then.
    """

    node_rank: int
    node: str
    age_s: float | None = None
    ranks: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class OthersSeen:
    """The other nodes of the cycle by node rank, and the names of those that wait for a place.

    Attributes:
        old_s: what a node that is well has said is never that old (seconds).
    """

    nodes: Sequence[NodeSeen] = ()
    waiting: Sequence[str] = ()
    old_s: float = 20.0


class OtherNodes(Protocol):
    """Asks the other nodes. Any thread may call its methods."""

    def ask_stacks(self) -> Callable[[], OtherStacks]:
        """Asks where their ranks are, and returns at once. The function that it returns waits for the answers, for a
        bounded time."""

    def counts(self) -> Mapping[str, int]:
        """Returns how many nodes of the job are in which state; empty where `seen` returns None."""

    def seen(self) -> OthersSeen | None:
        """Returns at once what the other nodes have said last, and has them say more while this is called again and
        again. None: this node is not the coordinator, or no cycle has begun."""
