"""The way of a node to the coordinator: what both kinds have, over a store (`node_link.py`) and in memory
(`local_link.py`). Types only.

So the agent has one way for a job of one node and of several: it sends what happened, asks for a place, and learns of
the end of a cycle by a descriptor. A node under a rendezvous that is not ours (`job/rendezvous/foreign.py`) has a link
in memory: it is the only node of its coordinator, however many nodes the job has.

`job/rendezvous/handler.py` makes the link and is the main caller; `agent/membership.py` asks for `cut` and sets
`is_polled`. A link decides nothing about cycles, which the coordinator does, and starts and ends no rank.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from ft_launcher.job.coordinator.node_messages import Answer, CycleEnd, Ended, JoinRequest, Left, RankAssigned


class CutReason(enum.Enum):
    """Why a node is cut off. The agent chooses the exit code by it."""

    REFUSED = enum.auto()
    """The store, or the coordinator on this node, has refused this node's work for too long."""
    NO_ANSWER = enum.auto()
    """The store gives no answer, or a thread that talks to it has failed."""
    NO_ROUTE = enum.auto()
    """This node has no route to the store: the node has lost its network, and the store may be well."""


@dataclass(frozen=True)
class Cut:
    """This node has had no part in the job for so long that others may count it as lost.

    Attributes:
        end_reason: what the link met.
        reason: the same in words, for journal and console.
    """

    end_reason: CutReason
    reason: str


class CoordinatorLink(Protocol):
    """The link of one node to the coordinator of its job.

    The agent's thread calls all of it, or a thread of `agent/ending_signal.py` while the agent waits for that thread.
    `answer`, `host_of_cycle` and `close` block, within their limits; `entered` may make one operation on the store. All
    else must return at once: the cycle loop calls `send`, `pop_end`, `cut` and `trouble` while ranks run.
    """

    is_polled: bool
    """Whether the agent calls `pop_end` as ends arrive: then an end that stays in the queue means that the agent stands
    still. The agent sets it while a cycle runs."""
    hosts_store: bool
    """Whether this node hosts the job's store."""

    def send(self, message: Ended | Left) -> None:
        """Sends a message to the coordinator; returns at once."""

    def ask(self, arrival: JoinRequest) -> None:
        """Sends an arrival, which `answer` waits for. Returns at once."""

    def answer(self, seq: int, limit_s: float) -> Answer | None:
        """Waits up to `limit_s` seconds for the answer to arrival number `seq`; None if none arrived.

        Raises:
            ProtocolError: what arrived is none.
        """

    def pop_end(self, cycle: int) -> CycleEnd | None:
        """Returns the end of this cycle; None if it was not received. Does not block."""

    def fileno(self) -> int | None:
        """Returns a descriptor that is readable when the end of a cycle was received; None: none comes by itself."""

    def entered(self, place: RankAssigned, hosted_by_user: bool = False) -> None:
        """Notes that this node takes part in a cycle. Called once for each cycle, before `pop_end`.

        `hosted_by_user`: the cycle's store is known to all from the command line.
        """

    def announce(self, cycle: int, host: str) -> None:
        """Publishes the address at which this node hosts the cycle's store. Returns at once."""

    def host_of_cycle(self, cycle: int, limit_s: float) -> bytes | None:
        """Waits up to `limit_s` seconds for the address of the cycle's store; None if it did not arrive, empty if the
        cycle ended before."""

    def was_superseded(self) -> bool:
        """Whether this node was the coordinator and another has taken over. Returns True once."""

    def cut(self, now: float) -> Cut | None:
        """Returns whether and why this node is cut off; None: it is not. To be called often while ranks run."""

    def trouble(self) -> Exception | None:
        """Returns the last error of the store; None while it answers."""

    def close(self, last: Left, limit_s: float) -> None:
        """Sends a last message and ends; waits up to `limit_s` seconds for nodes that have to read something here."""
