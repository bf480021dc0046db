"""The nodes of a job as its coordinator knows them: members of the last cycle, waiting nodes, lost nodes. Pure.

The `Roster` decides nothing: `coordinator.py` changes it as events arrive and reads it, `formation.py` reads it and
decides who is a member next, and `fault_decision.py` reads the faults and views in it. A node is known by its id, which
differs from launch to launch of the same host. A node is in `members`, in `waiting`, or in both: a member that has
arrived for the next cycle stays in `members` until that cycle forms.

    members   waiting      absent                  which node
    yes       no           no                      takes part in the cycle
    yes       yes          no                      has left the cycle, and waits for the next one
    yes       yes or no    FAILED, HUNG ...        failed, and the cycle goes on without it (`Rules.keep_healthy`)
    yes       no           LOST, LEFT, PREEMPTED   not expected back: the next cycle forms without it
    no        yes          no                      a newcomer or a spare

`RankClaims` are nodes outside of these: each insists on a node rank that another node, perhaps a dead one, holds.
Their `settle` does decide: it lets a node in whose rank is free, and refuses one that has waited too long.
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

# A node whose ranks failed arrives again. A node of these reasons does not, or not soon, so no cycle waits for it.
_NOT_BACK = (EndReason.LEFT, EndReason.LOST, EndReason.PREEMPTED)


class RankRange(NamedTuple):
    """The numbers of one node's ranks in a cycle. The fields are those of `RankAssigned`."""

    first_rank: int
    world_size: int
    first_role_rank: int
    role_world_size: int


class Roster:
    """The nodes that are known, each with its last arrival.

    Args:
        previous: the last record of the coordinator before; None: there was none.

    Attributes:
        cycle: number of the current or last cycle; NO_CYCLE: none has formed.
        members: the members of that cycle, in the order of their node ranks.
        waiting: the nodes that wait for the next cycle, in the order of their arrival.
        absent: members that are gone or have failed, and why.
        succeeded: members that have succeeded.
        failed: members that reported a failure, in the order of the reports.
    """

    def __init__(self, previous: Formed | None) -> None:
        self.cycle = NO_CYCLE
        self.members: dict[str, JoinRequest] = {}
        self.waiting: dict[str, JoinRequest] = {}
        if previous is not None:
            self.cycle = previous.cycle
            self.waiting = dict(previous.arrivals)
            self.members = {node: self.waiting.pop(node) for node in previous.members}
        self.absent: dict[str, EndReason] = {}
        self.succeeded: set[str] = set()
        self.failed: list[str] = []

    @property
    def active(self) -> dict[str, JoinRequest]:
        """The members that are not absent."""
        return {node: arrival for node, arrival in self.members.items() if node not in self.absent}

    @property
    def expected(self) -> set[str]:
        """The members that are present, or expected to return."""
        return {node for node in self.members if self.absent.get(node) not in _NOT_BACK}

    @property
    def without_ranks(self) -> list[str]:
        """The members whose ranks have ended and which do not report that: they are lost, have left, have succeeded, or
        have arrived again. A preempted node that hosts a store needs to know when all ranks have ended."""
        ended = [node for node, reason in self.absent.items() if reason in (EndReason.LEFT, EndReason.LOST)]
        return [node for node in self.members if node in ended or node in self.succeeded or node in self.waiting]

    @property
    def complete(self) -> bool:
        """Whether all members that are not absent wait for the next cycle; also before the first cycle."""
        return all(node in self.waiting or node in self.absent for node in self.members)

    @property
    def all_succeeded(self) -> bool:
        """Whether all members that are not absent have succeeded, at least one."""
        return bool(self.succeeded) and self.members.keys() <= self.succeeded | self.absent.keys()

    def is_active(self, node: str) -> bool:
        """Whether the node is a member and not absent."""
        return node in self.members and node not in self.absent

    def present(self) -> Iterable[JoinRequest]:
        """Returns the waiting nodes and the members that are not absent."""
        return chain(self.waiting.values(), self.active.values())

    def has(self, arrival: JoinRequest) -> bool:
        """Whether this arrival or a later one of its node is known.

        An arrival is posted again where the store's answer to the first post was lost, and then comes twice.
        """
        known = self.members.get(arrival.node), self.waiting.get(arrival.node)
        return any(earlier is not None and arrival.seq <= earlier.seq for earlier in known)

    def reports(self) -> dict[str, FaultReport | None]:
        """Returns the faults of the last cycle by node; None: none of the node's ranks failed by itself.

        Nodes that reported a failure while the cycle ran come first, in that order. Then come nodes that found a fault
        of their own only when they stopped their ranks for the failure of another node.
        """
        reported = [node for node in self.failed if node in self.waiting]
        brought = [node for node, arrival in self.waiting.items() if arrival.report and arrival.cycle == self.cycle]
        return {node: self.waiting[node].report for node in reported + brought}

    def node_views(self) -> NodeViews:
        """Returns what the nodes saw of their ranks in the last cycle, by the `views` of their arrivals.

        The values come from other nodes and may have any shape. Those that do not fit are left out.
        """
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
            # A node is gone without a word: the other ranks may have lost its ranks, and not those that returned.
            returned = {}
        return NodeViews(ranks, names, ranks.keys() >= self.members.keys(), nccl, returned)

    def numbers(self) -> dict[str, RankRange]:
        """Returns for each member, by node rank, which numbers its ranks have in the cycle.

        Ranks are numbered as torch's agents do it: one node after the other, and among the ranks of each role likewise.
        For example, nodes with 4, 2 and 4 ranks begin at the ranks 0, 4 and 6 of a world of 10.
        """
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
        """Notes the end of the cycle: members that failed or succeeded are expected to arrive again. Only those stay
        absent that are lost, have left or are preempted."""
        self.absent = {node: reason for node, reason in self.absent.items() if reason in _NOT_BACK}
        self.succeeded = set()

    def form(self, members: Iterable[JoinRequest]) -> None:
        """Begins the next cycle with these members, in the order of their node ranks; the other nodes go on waiting.

        The members' faults are dropped, since they have been decided on, and would only enlarge the record.
        """
        self.cycle += 1
        self.members = {arrival.node: replace(arrival, report=None, views={}) for arrival in members}
        self.waiting = {node: arrival for node, arrival in self.waiting.items() if node not in self.members}
        self.absent = {}
        self.failed = []


class RankClaims:
    """Nodes whose node rank another node holds (static rendezvous only). They wait for the loss of that node.

    The usual case is a launcher that was killed and started again on the same host, with the same `--node-rank`, before
    the job has noticed the loss. Where the holder lives, two nodes have been given the same rank by mistake, and the
    one that came later is refused.

    Args:
        me: the coordinator's node, which certainly lives: a claim of its rank is refused at once.
        rank_claim_s: for how many seconds a node waits at most; longer than the detection of a loss takes.
    """

    def __init__(self, me: str, rank_claim_s: float) -> None:
        self._me = me
        self._claim_s = rank_claim_s
        self._since: dict[str, tuple[JoinRequest, float]] = {}

    def add(self, arrival: JoinRequest, now: float) -> None:
        """Adds a node whose rank another node holds; the wait begins now."""
        self._since[arrival.node] = (arrival, now)

    def remove(self, node: str) -> None:
        """Removes the claim of a node that is gone."""
        self._since.pop(node, None)

    def pop_all(self) -> dict[str, JoinRequest]:
        """Removes and returns all claiming nodes."""
        taken = {node: arrival for node, (arrival, _) in self._since.items()}
        self._since = {}
        return taken

    def deadlines(self) -> list[float]:
        """Returns the times at which claims are refused (monotonic seconds)."""
        return [since + self._claim_s for _, since in self._since.values()]

    def settle(self, others: Iterable[JoinRequest], now: float) -> tuple[list[JoinRequest], list[Reply]]:
        """Returns the nodes whose rank is free now, and the refusals of those whose time is up; removes both.

        Args:
            others: the nodes that are not known to be gone.
            now: the current time (monotonic seconds).
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
