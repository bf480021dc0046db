"""Passes a request from a thread that answers it to the agent's thread, which alone may ask the monitors.

Threads: threads of the servers call `Asking.ask`, which blocks until the agent's thread has answered or a limit is
over. The agent's thread (`status_feed.py`) finds `fileno` readable, calls `drain`, asks the monitors, and calls
`answer` when all have answered. A condition protects the few numbers here; nobody holds it while anything is asked.

   server thread: ask() --ticket n, eventfd--> agent's thread: drain() -> n ... monitors ... answer(n) --> ask() returns

Requests are counted, not queued: one round of questions answers all requests made before `drain`. The types of what
other nodes say (`NodeSeen`, `OtherStacks`) and the protocol `OtherNodes` are here too, so that `answers.py` needs no
rendezvous; `job_nodes.py` implements the protocol.
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
"""Seconds. A request so soon after an answer gets that answer: a thousand clients cost no more than a few."""
_COLLECTIVES_FRESH_S = 2.0
"""The same for collectives (seconds): a full flight recorder of a rank takes 40 ms for its answer."""


@dataclass(frozen=True)
class SilentNode:
    """A node that did not answer a question in time."""

    node_rank: int
    node: str


@dataclass(frozen=True)
class OtherStacks:
    """Where the ranks of the other nodes are.

    Attributes:
        readings: one for each rank that answered.
        silent: the nodes that did not answer in time.
        problem: why no node could be asked; empty: they were asked.
    """

    readings: Sequence[RankReading] = ()
    silent: Sequence[SilentNode] = ()
    problem: str = ""


@dataclass(frozen=True)
class NodeSeen:
    """What another node has last reported of its ranks.

    Attributes:
        age_s: how long ago the report was read (seconds); None: the node has reported nothing in this cycle.
        ranks: as `ranks` of `/status.json`, with the ages that held at the time of the report.
    """

    node_rank: int
    node: str
    age_s: float | None = None
    ranks: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class OthersSeen:
    """What is known of the other nodes.

    Attributes:
        nodes: the other nodes of the cycle, in the order of node ranks.
        waiting: the names of the nodes that wait for a place.
        old_s: the age (seconds) that the report of a healthy node never reaches. An older report means that the node is
            silent.
    """

    nodes: Sequence[NodeSeen] = ()
    waiting: Sequence[str] = ()
    old_s: float = 20.0


class OtherNodes(Protocol):
    """Asks the other nodes of the job. Any thread may call the methods.

    A launcher has no such object where its node is alone, or where the rendezvous is not ours.
    """

    def ask_stacks(self) -> Callable[[], OtherStacks]:
        """Asks the other nodes where their ranks are. Does not block. The returned function blocks for the answers, for
        a bounded time, and returns them."""

    def counts(self) -> Mapping[str, int]:
        """Returns state -> number of nodes; empty where `seen` returns None."""

    def seen(self) -> OthersSeen | None:
        """Returns the last reports of the other nodes. Does not block.

        A call also has the other nodes report again, for some seconds: so reports are fresh while somebody calls this
        once a second, and cost nothing while nobody does. None: this node is not the coordinator, or no cycle has
        begun.
        """


class Asking:
    """The requests of one launcher for fresh readings. Threads of servers call `ask`; all else is for the agent's
    thread.

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
        """Blocks until all monitors have been asked and have answered, at most `limit_s` seconds.

        Args:
            stacks: also have the ranks write their stacks.
            collectives: also ask torch's flight recorder in each rank; stacks imply it.

        Returns:
            Whether the agent's thread has answered. True also where an answer of the last moment will do, and where the
            cycle ended meanwhile. None: no rank runs, so nobody could be asked.
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
        """Returns the descriptor that is readable while a request waits."""
        return self._event

    def set_active(self, is_active: bool) -> None:
        """Says whether the agent's loop polls the descriptor from now on. False releases everybody who waits.

        Called at the begin and the end of each cycle: between cycles no rank runs.
        """
        with self._condition:
            self._is_active = is_active
            self._condition.notify_all()

    def drain(self) -> tuple[int, bool, bool]:
        """Returns the number of requests so far, and whether a new one wants stacks, and collectives. Empties the
        descriptor."""
        with self._condition:
            try:
                os.eventfd_read(self._event)
            except BlockingIOError:
                pass
            stacks, self._with_stacks = self._with_stacks, False
            collectives, self._with_collectives = self._with_collectives, False
            return self._asked, stacks, collectives

    def answer(self, number: int) -> None:
        """Releases everybody whose request was among the first `number`."""
        with self._condition:
            self._answered = max(self._answered, number)
            self._answered_at = time.monotonic()
            self._condition.notify_all()

    def close(self) -> None:
        """Releases everybody who waits, and closes the descriptor. Called at the end of the launcher, after the
        servers."""
        self.set_active(False)
        os.close(self._event)
