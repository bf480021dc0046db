"""Where a thread that answers a request asks: the monitors, by the agent's thread, for which it waits a bounded time;
and the other nodes of the job, for which `tools/status/job_nodes.py` does it. Knows no store.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ft_launcher.tools.status.node_status import RankReading

_FRESH_S = 0.2
"""Who asks so soon after another gets what that one got: a thousand clients cost no more than a few."""
_COLLECTIVES_FRESH_S = 2.0
"""The same for collectives: a full flight recorder of a rank takes 40 ms for its answer."""


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
    """Asks the other nodes. Any thread may call its methods. Where a launcher has none, its node is alone, or its
    rendezvous is not ours."""

    def ask_stacks(self) -> Callable[[], OtherStacks]:
        """Asks where their ranks are, and returns at once. The function that it returns waits for the answers, for a
        bounded time."""

    def counts(self) -> Mapping[str, int]:
        """Returns how many nodes of the job are in which state; empty where `seen` returns None."""

    def seen(self) -> OthersSeen | None:
        """Returns at once what the other nodes have said last, and has them say more while this is called again and
        again. None: this node is not the coordinator, or no cycle has begun."""


class Asking:
    """One launcher's. `ask` is for the threads of servers, everything else for the agent's thread.

    Attributes:
        other_nodes: by which the other nodes of the job can be asked; None: there are none, or they cannot be asked.
    """

    def __init__(self) -> None:
        self.other_nodes: OtherNodes | None = None
        self._condition = threading.Condition()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._asked = self._answered = 0
        self._answered_at = 0.0
        self._with_stacks = False
        self._with_collectives = False
        self._collected_at = 0.0
        self._is_active = False

    def ask(self, limit_s: float, stacks: bool = False, collectives: bool = False) -> bool | None:
        """Waits until all monitors were asked and have answered, or until the limit (seconds).

        Args:
            stacks: have the ranks write their stacks too; this asks for collectives as well.
            collectives: ask torch's flight recorder in each rank.

        Returns:
            Whether the agent's thread has attended to it; None: no rank runs, so nobody could be asked.
        """
        with self._condition:
            if not self._is_active:
                return None
            now = time.monotonic()
            collectives = collectives and now >= self._collected_at + _COLLECTIVES_FRESH_S
            if not (stacks or collectives) and now < self._answered_at + _FRESH_S:
                return True
            if collectives:
                self._collected_at = now
            self._asked += 1
            ticket = self._asked
            self._with_stacks |= stacks
            self._with_collectives |= collectives
            os.eventfd_write(self._event, 1)
            self._condition.wait_for(lambda: self._answered >= ticket or not self._is_active, limit_s)
            return self._answered >= ticket or not self._is_active

    def fileno(self) -> int:
        """The descriptor that is readable when somebody asks."""
        return self._event

    def set_active(self, is_active: bool) -> None:
        """Says whether the agent's thread looks at the descriptor from now on. Who waits is released if it does not."""
        with self._condition:
            self._is_active = is_active
            self._condition.notify_all()

    def drain(self) -> tuple[int, bool, bool]:
        """Returns the number of requests so far, and whether one of the new ones wants stacks, and collectives."""
        with self._condition:
            try:
                os.eventfd_read(self._event)
            except BlockingIOError:
                pass
            stacks, self._with_stacks = self._with_stacks, False
            collectives, self._with_collectives = self._with_collectives, False
            return self._asked, stacks, collectives

    def answer(self, number: int) -> None:
        """Releases who has asked until `number`."""
        with self._condition:
            self._answered = max(self._answered, number)
            self._answered_at = time.monotonic()
            self._condition.notify_all()

    def close(self) -> None:
        """Closes the descriptor; nobody asks any more."""
        self.set_active(False)
        os.close(self._event)
