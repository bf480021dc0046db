"""Forms the next cycle from waiting nodes: when, with which of them, in which order; or ends the job. Pure.

Used by `coordinator.py`, which fills the roster, calls `Formation.decide` after each event, and carries out the result.
Must not know messages between nodes, nor change the members: it only chooses them.

When a cycle forms (`decide`), the first line that fits:

    1. A member of the last cycle that is expected back has not arrived: wait for it, up to `join_s`.
    2. The policy, asked once about the fault, ends the job: over.
    3. Too few nodes: wait up to `join_s`, then over. Over at once where a member was preempted: it may not be back.
    4. The policy wants a pause (`--ft-backoff`) that is not over: wait.
    5. The maximum of nodes, or all that is left of the last cycle: form at once.
    6. Else more nodes may come: wait `last_call_s` from the minimum on, then form.

`join_s` ends the wait of every line but 4.

Which nodes take part (`choose`): previous members first, each at its old node rank, so that rank 0 and its files stay
where they were; then nodes that waited. With segments (`--ft-segment`) nodes of one group, for instance below one
network switch, take part in whole multiples only. Where the ranks of a faulty node are to run on other hardware
(`choose_relocated`), a node that waits takes its place, if there is one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ft_launcher.job.coordinator.fault_decision import FaultDecision
from ft_launcher.job.coordinator.node_messages import NO_CYCLE, NO_RANK, Formed, JobOver, JoinRequest
from ft_launcher.job.coordinator.roster import Roster
from rank_monitor.contract.exit_codes import ExitCode


@dataclass(frozen=True)
class Size:
    """How many nodes a cycle may have.

    Attributes:
        minimum: fewer than this many nodes form no cycle.
        maximum: more than this many do not take part; the others wait as spares.
        held_back: so many nodes wait as spares while the minimum is reached without them (`--ft-spares`).
        segment: nodes of one group take part in multiples of this number only; None: each node for itself.
        may_grow: whether a cycle may have more nodes than the one before (`--ft-scale`).
        may_shrink: whether it may have fewer.
    """

    minimum: int
    maximum: int
    held_back: int = 0
    segment: int | None = None
    may_grow: bool = True
    may_shrink: bool = True

    def active(self, nodes: int, before: int) -> int:
        """Returns how many of `nodes` take part; 0 if too few.

        Args:
            nodes: how many are there.
            before: how many took part in the last cycle; 0: there was none.
        """
        count = min(self.maximum, max(self.minimum, nodes - self.held_back))
        if before and not self.may_grow:
            count = min(count, before)
        floor = self.minimum
        if not self.may_shrink:
            floor = max(floor, before)
        count = min(count, nodes)
        if count >= floor:
            return count
        return 0


@dataclass(frozen=True)
class Rules:
    """How many nodes, and how long to wait for them.

    Attributes:
        size: how many.
        last_call_s: seconds from the minimum of nodes to the formation, unless a cycle can form at once; torch's
            `last_call_timeout`.
        join_s: for how many seconds too few nodes wait for more; torch's `join_timeout`.
        keep_healthy: neither a failed node nor one that waits ends the cycle while the minimum of nodes is healthy
            (`--ft-restart-policy min-healthy`).
        rank_claim_s: for how many seconds a node waits whose node rank is held by another node, which may be dead.
        hosts: the coordinator's node hosts the store, so the job ends when it leaves.
        hint: text that is added to the reason where nodes turn out to be too few; for instance, that the store belongs
            to a job of another id.
    """

    size: Size
    last_call_s: float = 30.0
    join_s: float = 600.0
    keep_healthy: bool = False
    rank_claim_s: float = 20.0
    hosts: bool = False
    hint: str = ""


class Formation:
    """Forms the next cycle.

    Attributes:
        reason: why there is to be a next cycle, in words: at first why the last one ended (`begin`), then the policy's
            reason (`decide`). Every member receives it with its place.
        preempted: which member was preempted since the last formation, in words; empty: none was. The coordinator sets
            it.

    Args:
        rules: how many nodes, and how long to wait for them.
        roster: the nodes; read only.
        decision: decides about the fault that ended the last cycle; asked once for each cycle.
        now: the current time (monotonic seconds).
        previous: the last record of the coordinator before; None: there was none.
    """

    def __init__(
        self, rules: Rules, roster: Roster, decision: FaultDecision, now: float, previous: Formed | None
    ) -> None:
        self._rules, self._roster, self._fault_decision = rules, roster, decision
        self.reason = "the first nodes came"
        if previous is not None and previous.reason:
            self.reason = previous.reason
        self.preempted = ""
        self._since = self._not_before = now
        self._enough_since: float | None = None

    def begin(self, reason: str, now: float) -> None:
        """Begins to form a cycle: the last one ended for the reason `reason`, and its fault is to be decided on.

        All waits begin anew: `join_s` counts from here, and the policy sets the pause when it is asked.
        """
        self.reason = reason
        self._since = now
        self._not_before = now
        self._enough_since = None
        self._fault_decision.reset()

    def deadlines(self, forming: bool) -> list[float]:
        """Returns the times (monotonic seconds) at which the result of `decide` may change by time alone.

        Args:
            forming: whether a cycle is to form; otherwise one runs, and the times are those of `grows`.
        """
        if forming:
            ends = [max(self._since + self._rules.join_s, self._not_before)]
        else:
            ends = []
        if self._enough_since is not None:
            ends.append(max(self._enough_since + self._last_call_s(forming), self._not_before))
        return ends

    def grows(self, now: float) -> bool:
        """Whether a healthy cycle is to end now so that waiting nodes take part.

        A cycle in which a member has succeeded does not begin again for that: its work would be done twice. Nor does a
        cycle with `keep_healthy`: there a lost node would cost two restarts, the second when another node has come.
        """
        if self._rules.keep_healthy:
            return False
        roster, size, grown_to = self._roster, self._rules.size, 0
        if roster.waiting and size.may_grow and not roster.succeeded:
            possible = how_many((roster.active | roster.waiting).values(), len(roster.members), size)
            if possible > len(roster.members):
                grown_to = possible
        return self._is_due(grown_to, forming=False, now=now)

    def decide(self, now: float) -> list[JoinRequest] | JobOver | None:
        """Decides what follows the last cycle, by the list at the top of this file.

        The first call at which all expected members have arrived, or `join_s` is over, asks the policy about the fault,
        once for each cycle. The answer is kept: `reason` becomes its reason, and its backoff holds up later calls.

        Returns:
            The members of the next cycle, by node rank; or why the job is over; None: more nodes are awaited.
        """
        roster, overdue = self._roster, now >= self._since + self._rules.join_s
        if not overdue and not roster.complete:
            return None
        if self._fault_decision.answer is None:
            answer = self._fault_decision.decide(roster, self.reason, now)
            self.reason = answer.reason
            self._not_before = now + answer.wait_s
            if answer.exit_code is not None:
                return JobOver(answer.exit_code, answer.reason, answer.judgement)
        due = self._is_due(
            how_many(roster.waiting.values(), len(roster.members), self._rules.size), forming=True, now=now
        )
        if self._enough_since is None:
            if overdue or self.preempted:
                return self._too_few()
            return None
        if not (due or overdue) or now < self._not_before:
            return None
        self._enough_since = None
        self.preempted = ""
        arrivals, previous, decided = list(roster.waiting.values()), list(roster.members), self._fault_decision
        if decided.answer is not None and decided.answer.relocates:
            return choose_relocated(arrivals, previous, self._rules.size, decided.faulty_node)
        return choose(arrivals, previous, self._rules.size)

    def _is_due(self, count: int, forming: bool, now: float) -> bool:
        """Whether `count` nodes need not wait for more. Notes the time at which there were enough.

        Args:
            count: how many nodes would take part; 0: too few.
            forming: whether no cycle runs.
        """
        if count == 0:
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        return count == self._rules.size.maximum or now >= self._enough_since + self._last_call_s(forming)

    def _last_call_s(self, forming: bool) -> float:
        """Returns how many seconds enough nodes wait for more: none after a cycle of which members are left.

        They wait only for each other then: each second would be lost by all of them.
        """
        if forming and self._roster.active:
            return 0.0
        return self._rules.last_call_s

    def _too_few(self) -> JobOver:
        """Returns the end of the job for want of nodes. Its exit code says whether a cycle had ever formed."""
        size = self._rules.size
        if self.preempted:
            return JobOver(int(ExitCode.PREEMPTED), f"{self.preempted}, and the others are too few without it")
        text = f"{len(self._roster.waiting)} of at least {size.minimum} nodes came within {self._rules.join_s:g} s"
        if self._rules.hint:
            text = f"{text}; {self._rules.hint}"
        if self._roster.cycle == NO_CYCLE:
            code = ExitCode.RENDEZVOUS_FAILED
        else:
            code = ExitCode.BELOW_MINIMUM
        return JobOver(int(code), text)


def how_many(arrivals: Collection[JoinRequest], before: int, size: Size) -> int:
    """Returns how many of these nodes `choose` takes; 0 if there are too few.

    Called more often than `choose`, with up to thousands of nodes: so it counts, and does not sort.

    Args:
        arrivals: the nodes that are there.
        before: how many members the last cycle had.
        size: how many there may be.
    """
    count, segment = size.active(len(arrivals), before), size.segment or 1
    if segment > 1:
        blocks = sum(nodes // segment for nodes in Counter(node.group for node in arrivals).values())
        count = min(count // segment, blocks) * segment
    if count >= size.minimum:
        return count
    return 0


def choose(arrivals: Sequence[JoinRequest], previous: Sequence[str], size: Size) -> list[JoinRequest]:
    """Returns the members of the next cycle by node rank; empty if there are too few.

    Previous members keep their order, so that rank 0 stays where it was. Newcomers take the places of lost members,
    then follow at the end. Nodes that insist on a rank get it.

    For example: the last cycle had the nodes a, b, c; b is lost, and d and e wait; a cycle has at most three nodes.
    Then the members are a, d, c: d takes the node rank of b, and e goes on waiting.

    Args:
        arrivals: the waiting nodes, each once.
        previous: members of the last cycle by rank, lost ones included.
        size: how many there may be.
    """
    segment, count = size.segment or 1, how_many(arrivals, len(previous), size)
    if segment == 1:
        members = _arrange(arrivals, previous, count)
    else:
        members = [node for block in _segments(arrivals, previous, segment)[: count // segment] for node in block]
    if any(node.rank != NO_RANK for node in members):
        members.sort(key=lambda node: _first_order(node)[0])
    return members


def choose_relocated(
    arrivals: Sequence[JoinRequest], previous: Sequence[str], size: Size, faulty_node: str
) -> list[JoinRequest]:
    """Returns the members of the next cycle without `faulty_node` if as many nodes are left; else as `choose` does.

    Without a node that can take its place the job goes on with the faulty node, rather than with fewer nodes.

    Args:
        arrivals: the waiting nodes, each once.
        previous: members of the last cycle by rank.
        size: how many there may be.
        faulty_node: the id of the node that ranks are to leave.
    """
    others = [node for node in arrivals if node.node != faulty_node]
    if how_many(others, len(previous), size) == how_many(arrivals, len(previous), size):
        return choose(others, previous, size)
    return choose(arrivals, previous, size)


def _arrange(arrivals: Sequence[JoinRequest], previous: Sequence[str], count: int) -> list[JoinRequest]:
    """Returns `count` of the nodes: previous members at their old places, newcomers in the gaps, then at the end."""
    there, known = {node.node: node for node in arrivals}, set(previous)
    back = set([node for node in previous if node in there][:count])
    new = sorted((node for node in arrivals if node.node not in known), key=_first_order)[: count - len(back)]
    waiting = iter(new)
    places = [there[node] if node in back else next(waiting, None) for node in previous]
    return [node for node in places if node is not None][:count] + list(waiting)


def _segments(arrivals: Sequence[JoinRequest], previous: Sequence[str], length: int) -> list[list[JoinRequest]]:
    """Returns whole segments, each `length` nodes of one group; nodes that fill no segment are left out.

    Segments with previous members come first, in the order of their lowest previous node rank.
    """
    groups: dict[str, list[JoinRequest]] = defaultdict(list)
    for node in arrivals:
        groups[node.group].append(node)
    rank = {node: index for index, node in enumerate(previous)}
    blocks = []
    for members in groups.values():
        ours = {node.node for node in members}
        arranged = _arrange(members, [node for node in previous if node in ours], len(members))
        blocks += [arranged[at : at + length] for at in range(0, len(arranged) - length + 1, length)]
    last = len(previous)
    return sorted(blocks, key=lambda block: (min(rank.get(node.node, last) for node in block), _first_order(block[0])))


def _first_order(node: JoinRequest) -> tuple[int, str, str]:
    """Returns the sort key of a node that was no member before: its node rank, then its `order`, then its id."""
    rank = node.rank
    if rank == NO_RANK:
        # Above any node rank: nodes without one come after those that insist on theirs.
        rank = 1 << 30
    return (rank, node.order, node.node)
