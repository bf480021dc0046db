"""The nodes of a job as its coordinator knows them: members of the last cycle, waiting nodes, lost nodes. Pure.

`RankClaims` are the nodes that insist on a node rank which another node, perhaps a dead one, holds. `formation.py` and
`coordinator.py` decide what follows.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from ft_launcher.decide.policy.case import FaultReport, NodeViews
from ft_launcher.job.coordinator.node_messages import NO_CYCLE, NO_RANK, EndReason, Formed, JobOver, JoinRequest, Reply
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.wire.json_record import real

# A node whose ranks failed arrives again; these nodes do not, or not soon.
_NOT_BACK = (EndReason.LEFT, EndReason.LOST, EndReason.PREEMPTED)


class RankRange(NamedTuple):
    """The numbers of one node's ranks in a cycle, as `RankAssigned` has them."""

    first_rank: int
    world_size: int
    first_role_rank: int
    role_world_size: int


class Roster:
    """Arrivals by node: `members` by rank in cycle number `cycle`, `waiting` in the order of their arrival.

    `away` are members that are gone or failed, `done` those that succeeded; `failed` reported a failure, in this order.
    """

    def __init__(self, former: Formed | None) -> None:
        self.cycle = NO_CYCLE
        self.members: dict[str, JoinRequest] = {}
        self.waiting: dict[str, JoinRequest] = {}
        if former is not None:
            self.cycle = former.cycle
            self.waiting = dict(former.arrivals)
            self.members = {node: self.waiting.pop(node) for node in former.members}
        self.away: dict[str, EndReason] = {}
        self.done: set[str] = set()
        self.failed: list[str] = []

    @property
    def living(self) -> dict[str, JoinRequest]:
        """The members that are not away."""
        return {node: arrival for node, arrival in self.members.items() if node not in self.away}

    @property
    def not_gone(self) -> set[str]:
        """The members that are present, or expected to return."""
        return {node for node in self.members if self.away.get(node) not in _NOT_BACK}

    @property
    def without_ranks(self) -> list[str]:
        """The members whose ranks have ended for good: they are lost, have left, succeeded, or arrived again."""
        ended = [node for node, reason in self.away.items() if reason in (EndReason.LEFT, EndReason.LOST)]
        return [node for node in self.members if node in ended or node in self.done or node in self.waiting]

    @property
    def complete(self) -> bool:
        """Whether all living members wait for the next cycle."""
        return all(node in self.waiting or node in self.away for node in self.members)

    @property
    def succeeded(self) -> bool:
        """Whether all members that are not away have succeeded, at least one."""
        return bool(self.done) and self.members.keys() <= self.done | self.away.keys()

    def lives(self, node: str) -> bool:
        """Whether the node is a member and not away."""
        return node in self.members and node not in self.away

    def present(self) -> Iterable[JoinRequest]:
        """Returns the waiting nodes and the living members."""
        return chain(self.waiting.values(), self.living.values())

    def has(self, arrival: JoinRequest) -> bool:
        """Whether this arrival or a later one of its node is known: it is repeated if the store's answer was lost."""
        known = self.members.get(arrival.node), self.waiting.get(arrival.node)
        return any(earlier is not None and arrival.seq <= earlier.seq for earlier in known)

    def reports(self) -> dict[str, FaultReport | None]:
        """Returns the faults of the last cycle by node, in the order in which nodes reported them; None: a node has
        reported a failure, and none of its ranks failed by itself."""
        reported = [node for node in self.failed if node in self.waiting]
        brought = [node for node, arrival in self.waiting.items() if arrival.report and arrival.cycle == self.cycle]
        return {node: self.waiting[node].report for node in reported + brought}

    def node_views(self) -> NodeViews:
        """Returns what the nodes saw of their ranks, as far as they brought it with them from the last cycle."""
        ranks, names, nccl, returned = {}, {}, {}, {}
        for node, arrival in self.waiting.items():
            if arrival.cycle != self.cycle:
                continue
            found = arrival.views.get("ranks")
            if isinstance(found, list):
                ranks[node], names[node] = found, arrival.name
                nccl[node] = arrival.views.get("nccl")
            # What does not fit is left out: the fault that a node reported stands.
            with contextlib.suppress(AttributeError, TypeError, ValueError):
                ended = arrival.views.get("returned", {})
                ages = {int(rank): real(ended, rank) for rank in ended}
                returned.update({rank: ago_s for rank, ago_s in ages.items() if ago_s is not None and ago_s >= 0})
        if not self.waiting.keys() >= self.members.keys():
            returned = {}  # others may have lost the ranks of a node that is gone
        return NodeViews(ranks, names, ranks.keys() >= self.members.keys(), nccl, returned)

    def numbers(self) -> dict[str, RankRange]:
        """Returns for each member, by node rank, which numbers its ranks have in the cycle, as torch's agents number
        them: one node after the other, and among the ranks of each role likewise."""
        of_role = Counter[str]()
        for arrival in self.members.values():
            of_role[arrival.role] += arrival.nprocs
        world_size, first_rank, first_role_rank, found = of_role.total(), 0, Counter[str](), dict[str, RankRange]()
        for node, arrival in self.members.items():
            role = arrival.role
            found[node] = RankRange(first_rank, world_size, first_role_rank[role], of_role[role])
            first_rank += arrival.nprocs
            first_role_rank[role] += arrival.nprocs
        return found

    def end(self) -> None:
        """Notes the end of the cycle: members that failed are expected to return."""
        self.away = {node: reason for node, reason in self.away.items() if reason in _NOT_BACK}
        self.done = set()

    def form(self, members: Iterable[JoinRequest]) -> None:
        """Begins the next cycle with these members, by rank; the others go on waiting."""
        self.cycle += 1
        self.members = {arrival.node: replace(arrival, report=None, views={}) for arrival in members}
        self.waiting = {node: arrival for node, arrival in self.waiting.items() if node not in self.members}
        self.away = {}
        self.failed = []


class RankClaims:
    """Nodes whose node rank another node holds. They wait at most `rank_claim_s` seconds for the loss of that node.

    They do not wait for the loss of this node, `me`, which lives.
    """

    def __init__(self, me: str, rank_claim_s: float) -> None:
        self._me = me
        self._claim_s = rank_claim_s
        self._since: dict[str, tuple[JoinRequest, float]] = {}

    def keep(self, arrival: JoinRequest, now: float) -> None:
        """Adds a node whose rank another node holds."""
        self._since[arrival.node] = (arrival, now)

    def drop(self, node: str) -> None:
        """Removes the claim of a node that is gone."""
        self._since.pop(node, None)

    def take_all(self) -> dict[str, JoinRequest]:
        """Removes and returns all claiming nodes."""
        taken = {node: arrival for node, (arrival, _) in self._since.items()}
        self._since = {}
        return taken

    def deadlines(self) -> list[float]:
        """Returns the times at which claims are refused."""
        return [since + self._claim_s for _, since in self._since.values()]

    def settle(self, others: Iterable[JoinRequest], now: float) -> tuple[list[JoinRequest], list[Reply]]:
        """Returns the nodes whose rank is free now, and the refusals of those whose time is up.

        Args:
            others: the nodes that are not known to be gone.
        """
        let_in, refused, there = list[JoinRequest](), list[Reply](), list(others)
        for arrival, since in list(self._since.values()):
            holder = holder_of(arrival, there)
            if holder is None:
                let_in.append(arrival)
                there.append(arrival)
            elif holder.node == self._me or now >= since + self._claim_s:
                reason = f"node rank {arrival.rank} is taken by node {holder.name}; give each node its own --node-rank"
                refused.append(Reply(arrival.node, arrival.seq, JobOver(int(ExitCode.BAD_CONFIG), reason)))
            else:
                continue
            del self._since[arrival.node]
        return let_in, refused


def holder_of(arrival: JoinRequest, others: Iterable[JoinRequest]) -> JoinRequest | None:
    """Returns the node among `others` with the node rank that this arrival insists on; None if that is free."""
    if arrival.rank == NO_RANK:
        return None
    return next((node for node in others if node.rank == arrival.rank and node.node != arrival.node), None)
