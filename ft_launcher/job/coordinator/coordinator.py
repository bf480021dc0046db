"""Forms the cycles of a job of several nodes: messages, losses and time in, answers out. Pure.

Knows no store, no thread and no clock, so a fault that takes weeks to occur is a line of a test.

    FORMING   arrivals are kept until a cycle can form: at once when all living members of the last cycle are back, or
              the maximum is reached; else `last_call_s` after the minimum was reached. Too few for `join_s`, or too few
              after a member was preempted: OVER.
    RUNNING   ended by the first failure, loss, preemption or departure of a member, by a request, or to grow: FORMING.
              All members succeeded, or a rank of one asked for the end of the job: OVER.
    OVER      every further arrival is answered with the end of the job, also after a take-over.

Messages of an ended cycle change nothing later: each carries its cycle's number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum, auto

from ft_launcher.decide.policy.case import Policy, PolicyJudgement, RankRequest
from ft_launcher.decide.policy.restart_policy import Action, asks_for_restart, is_known
from ft_launcher.job.coordinator.beat_schedule import DEPUTIES
from ft_launcher.job.coordinator.fault_decision import FaultDecision
from ft_launcher.job.coordinator.formation import Formation, Rules
from ft_launcher.job.coordinator.node_messages import (
    NO_CYCLE,
    CycleEnd,
    Ended,
    EndReason,
    Formed,
    JobOver,
    JoinRequest,
    Left,
    Members,
    RankAssigned,
    RanksEnded,
    Reply,
    ToCoordinator,
    Work,
)
from ft_launcher.job.coordinator.roster import RankClaims, Roster, holder_of
from rank_monitor.contract.exit_codes import ExitCode


class Phase(Enum):
    """The phase of the job."""

    FORMING = auto()
    RUNNING = auto()
    OVER = auto()


class Coordinator:
    """The state machine of the coordinator.

    Attributes:
        phase: of the job.
        read: how many messages of the inbox it has taken, in their order.
        has_left: it has taken the message by which its own node leaves.
    """

    def __init__(self, me: str, rules: Rules, policy: Policy, now: float, former: Formed | None = None) -> None:
        self.phase = Phase.FORMING
        self.read = 0
        self.has_left = False
        self._me, self._rules = me, rules
        self._roster = Roster(former)
        self._fault_decision = FaultDecision(policy, now, former)
        self._formation = Formation(rules, self._roster, self._fault_decision, now, former)
        self._rank_claims = RankClaims(me, rules.rank_claim_s)
        self._term = 1
        self._preempted_by = 0
        self._ignored: set[str] = set()
        self._notified: set[str] = set()
        self._over = JobOver(int(ExitCode.OK), "")
        if former is not None:
            self._take_over(former)

    def _take_over(self, former: Formed) -> None:
        self._term, self.read = former.term + 1, former.read
        self._ignored = {*former.deposed, former.coordinator} - {self._me}
        if former.members:
            self.phase = Phase.RUNNING
        if former.over is not None:
            self.phase = Phase.OVER
            self._over = former.over

    @property
    def nodes(self) -> set[str]:
        """The nodes that take part, wait, or have still to leave, without those that are known to be gone."""
        return {arrival.node for arrival in self._roster.present()} | self.to_leave

    @property
    def size(self) -> int:
        """How many nodes the current or last cycle has."""
        return len(self._roster.members)

    @property
    def to_leave(self) -> set[str]:
        """Once the job is over: the other nodes that were notified and have not left yet."""
        if self.phase is Phase.OVER:
            return self._notified - {self._me}
        return set()

    def standing(self) -> tuple[int, frozenset[str], frozenset[str]] | None:
        """Returns the number of the cycle that runs, the nodes that wait meanwhile, and the members that it goes on
        without; None: no cycle runs."""
        if self.phase is not Phase.RUNNING:
            return None
        return self._roster.cycle, frozenset(self._roster.waiting), frozenset(self._roster.away)

    def members(self) -> Members:
        """Returns the names of the nodes of the current or last cycle, and of those that wait."""
        active = [arrival.name for arrival in self._roster.members.values()]
        waiting = [arrival.name for arrival in self._roster.waiting.values()]
        gone = [rank for rank, node in enumerate(self._roster.members) if node in self._roster.away]
        return Members(self._roster.cycle, active, waiting, gone)

    @property
    def judgement(self) -> PolicyJudgement | None:
        """What was decided about the fault of the last cycle; None: nothing was, or it is not decided yet."""
        return self._fault_decision.judgement

    def formed(self) -> Formed:
        """Returns what another coordinator needs to take over."""
        arrivals = self._roster.members | self._roster.waiting
        cycle = (self._roster.cycle, self._me, self._term, self.read, list(self._roster.members), self._formation.why)
        if self.phase is Phase.OVER:
            over = self._over
        else:
            over = None
        return Formed(*cycle, arrivals, over=over, deposed=sorted(self._ignored), **self._fault_decision.record())

    def resend(self) -> list[Work]:
        """Returns, after a take-over, what the former coordinator may have decided and not sent; safe to send twice."""
        if self.phase is Phase.RUNNING:
            work: list[Work] = []
            before = self._roster.cycle - 1
            if before >= 0:  # a node that did not hear of that cycle's end still waits for it
                work.append(CycleEnd(before, EndReason.RESTART, self._formation.why))
            return [*work, *self._places()]
        if self.phase is Phase.FORMING:
            return []
        everybody = self._roster.members | self._roster.waiting
        self._roster.waiting = {}
        return [
            self._cycle_end(self._over.end_reason, self._over.reason, self._over.exit_code),
            *self._answer(everybody, self._over),
        ]

    # Events.

    def on(self, message: ToCoordinator, now: float) -> list[Work]:
        """Processes one message of the inbox."""
        self.read += 1
        match message:
            case JoinRequest():
                return self._arrived(message, now)
            case Ended():
                return self._ended(message, now)
            case Left():
                self._fault_decision.forget_node(message.node)
                return [*self._ranks_ended([message.node]), *self._left(message, now)]

    def on_lost(self, node: str, now: float) -> list[Work]:
        """Processes the loss of a node: it has not beaten for too long."""
        self._fault_decision.forget_node(node)
        ended = self._ranks_ended([node])
        return [*ended, *self._away_now(node, EndReason.LOST, "gave no sign of life", now)]

    def on_tick(self, now: float) -> list[Work]:
        """Processes the passing of time: what is due at `now`."""
        refused = self._settle_rank_claims(now)
        if self.phase is Phase.FORMING:
            return refused + self._try_form(now)
        if self.phase is Phase.RUNNING and self._formation.grows(now):
            return refused + self._end_cycle(EndReason.GREW, f"{len(self._roster.waiting)} more nodes are here", now)
        return refused

    def next_deadline(self) -> float | None:
        """Returns when `on_tick` is due; None if no deadline is set."""
        ends = self._rank_claims.deadlines()
        if self.phase is not Phase.OVER:
            ends += self._formation.deadlines(self.phase is Phase.FORMING)
        return min(ends, default=None)

    def _arrived(self, arrival: JoinRequest, now: float) -> list[Work]:
        # A deposed coordinator arrives again under a new id; messages under the old one may still be in the inbox.
        if arrival.node in self._ignored:
            return []
        is_repeated = self._roster.has(arrival)
        gone: list[Work] = []
        if not is_repeated:
            gone = self._ranks_ended([arrival.node])
        dismissal = self._fault_decision.dismissal(arrival.node)
        if dismissal is not None:
            return [*gone, Reply(arrival.node, arrival.seq, dismissal)]
        if self.phase is Phase.OVER:
            self._notified.add(arrival.node)
            return [*gone, *self._answer({arrival.node: arrival}, self._over)]
        if is_repeated:
            return []
        if arrival.rank >= self._rules.size.maximum:
            reason = f"node rank {arrival.rank} is not below the number of nodes, {self._rules.size.maximum}"
            return [Reply(arrival.node, arrival.seq, JobOver(int(ExitCode.BAD_CONFIG), reason))]
        if holder_of(arrival, self._roster.present()) is not None:
            self._rank_claims.keep(arrival, now)
            return self._settle_rank_claims(now)
        ending: list[Work] = []
        # A member that arrives while its cycle runs was started again: its ranks are gone.
        if self.phase is Phase.RUNNING and self._roster.lives(arrival.node):
            ending = self._end_cycle(EndReason.FAILED, f"node {arrival.name} started again", now)
        self._roster.waiting[arrival.node] = arrival
        return gone + ending + self.on_tick(now)

    def _settle_rank_claims(self, now: float) -> list[Work]:
        let_in, refused = self._rank_claims.settle(self._roster.present(), now)
        self._roster.waiting |= {arrival.node: arrival for arrival in let_in}
        return list(refused)

    def _ended(self, ended: Ended, now: float) -> list[Work]:
        # A message of an ended cycle, or of a node that was counted as lost, changes nothing.
        if ended.cycle != self._roster.cycle or not self._roster.lives(ended.node):
            return []
        if ended.reason in (EndReason.FAILED, EndReason.HUNG, EndReason.STOOD_STILL, EndReason.AGREED):
            self._roster.failed.append(ended.node)
        if ended.reason is EndReason.PREEMPTED:
            return self._preempted(ended.node, ended.signal, ended.text, now)
        if ended.request is not None:
            return self._asked(ended.node, ended.request, ended.text, now)
        gone: list[Work] = []
        if ended.reason is EndReason.SUCCEEDED:
            gone = self._ranks_ended([ended.node])
        if self.phase is not Phase.RUNNING:
            return gone
        match ended.reason:
            case EndReason.SUCCEEDED:
                self._roster.done.add(ended.node)
                return gone + self._succeed_if_all()
            case EndReason.GREW:  # only a handler that is not ours says so
                return self._end_cycle(ended.reason, ended.text, now)
        reason = f"node {self._roster.members[ended.node].name}: {ended.text}"
        return self._lose_member(ended.node, ended.reason, reason, now)

    def _asked(self, node: str, asked: RankRequest, text: str, now: float) -> list[Work]:
        """Processes a request of a rank. Its node receives the decision with the answer to its next arrival.

        A request for the end of the job, or for the node to leave, counts also where the cycle has ended meanwhile. One
        for a restart does not: what ended the cycle has restarted it.
        """
        if self.phase is Phase.OVER or not is_known(asked.request):
            return []
        if self.phase is Phase.FORMING and asks_for_restart(asked.request):
            return []
        decision = self._fault_decision.decide_request(node, asked, now)
        if decision is None:
            return []
        match decision.action:
            case Action.RESTART:
                return self._end_cycle(EndReason.RESTART, text, now)
            case Action.LEAVE:
                return [*self._ranks_ended([node]), *self._away_now(node, EndReason.LEFT, text, now)]
            case Action.GIVE_UP:
                code = decision.exit_code or int(ExitCode.JOB_STOPPED)
                if self.phase is Phase.RUNNING:
                    return self._finish(EndReason.STOP, code, text)
                self._notified |= self._roster.not_gone
                return self._give_up(JobOver(code, text))

    def _left(self, left: Left, now: float) -> list[Work]:
        """Processes a departure. That of a member whose launcher was told to end is a preemption.

        Such a launcher may have had no ranks that it could report as preempted: they had failed, or were not started.
        """
        roster = self._roster
        self.has_left |= left.node == self._me
        is_host = self._rules.hosts and left.node == self._me and roster.cycle != NO_CYCLE
        is_expected = left.node in roster.not_gone and left.node not in roster.done
        if not left.signal or self.phase is Phase.OVER or not (is_host or is_expected):
            return self._away_now(left.node, EndReason.LEFT, left.reason, now)
        self._rank_claims.drop(left.node)
        return self._preempted(left.node, left.signal, left.reason, now)

    def _preempted(self, node: str, number: int, reason: str, now: float) -> list[Work]:
        """Processes a preemption. The others go on without that node if they are enough: it may not be back."""
        roster = self._roster
        arrival = roster.waiting.pop(node, None) or roster.members[node]
        roster.away[node] = EndReason.PREEMPTED
        gone = self._ranks_ended(roster.without_ranks)
        if self.phase is Phase.OVER:
            return gone
        reason = f"node {arrival.name} is preempted: {reason}"
        self._formation.preempted = reason
        self._preempted_by = number
        if self._rules.hosts and node == self._me:
            return gone + self._finish(EndReason.PREEMPTED, int(ExitCode.PREEMPTED), reason)
        if self.phase is Phase.RUNNING:
            return gone + self._lose_member(node, EndReason.PREEMPTED, reason, now)
        return gone + self.on_tick(now)

    def _ranks_ended(self, nodes: Iterable[str]) -> list[Work]:
        """Returns the word that the ranks of these members of the cycle have ended, if another member is preempted.

        Members that hear of a preemption say so themselves. These may not have heard of it: they are lost, have left,
        were done, or arrived again after a fault. A preempted node that hosts a store would stay for them in vain.
        """
        roster = self._roster
        if EndReason.PREEMPTED not in roster.away.values():
            return []
        ranks = {node: rank for rank, node in enumerate(roster.members)}
        return [RanksEnded(roster.cycle, ranks[node]) for node in nodes if node in ranks]

    def _away_now(self, node: str, end_reason: EndReason, reason: str, now: float) -> list[Work]:
        roster = self._roster
        self._notified.discard(node)
        roster.waiting.pop(node, None)
        self._rank_claims.drop(node)
        if self._rules.hosts and node == self._me and self.phase is not Phase.OVER:
            reason = f"the node that hosts the store left: {reason}"
            return self._finish(EndReason.LEFT, int(ExitCode.STORE_HOST_LOST), reason)
        if node not in roster.not_gone:
            return self.on_tick(now)
        if self.phase is not Phase.RUNNING or node in roster.done:
            roster.away[node] = end_reason
            return self.on_tick(now)
        if end_reason is EndReason.LEFT:
            verb = "left"
        else:
            verb = "is lost"
        return self._lose_member(node, end_reason, f"node {roster.members[node].name} {verb}: {reason}", now)

    def _lose_member(self, node: str, end_reason: EndReason, reason: str, now: float) -> list[Work]:
        self._roster.away[node] = end_reason
        if self._rules.keep_healthy and len(self._roster.living) >= self._rules.size.minimum:
            return self._succeed_if_all()
        return self._end_cycle(end_reason, reason, now)

    def _succeed_if_all(self) -> list[Work]:
        if self._roster.succeeded:
            return self._finish(EndReason.SUCCEEDED, int(ExitCode.OK), "all ranks succeeded")
        return []

    # Endings.

    def _end_cycle(self, end_reason: EndReason, reason: str, now: float) -> list[Work]:
        self.phase = Phase.FORMING
        self._roster.end()
        self._formation.begin(reason, now)
        return [self._cycle_end(end_reason, reason), *self._try_form(now)]

    def _cycle_end(self, end_reason: EndReason, reason: str, exit_code: int | None = None) -> CycleEnd:
        if end_reason is EndReason.PREEMPTED:
            number = self._preempted_by
        else:
            number = 0
        return CycleEnd(self._roster.cycle, end_reason, reason, exit_code, number)

    def _finish(self, end_reason: EndReason, exit_code: int, reason: str) -> list[Work]:
        self._notified |= self._roster.not_gone
        return [self._cycle_end(end_reason, reason, exit_code), *self._give_up(JobOver(exit_code, reason))]

    def _give_up(self, over: JobOver) -> list[Work]:
        self.phase = Phase.OVER
        self._over = over
        self._roster.waiting |= self._rank_claims.take_all()
        formed = self.formed()
        waiting = self._roster.waiting
        self._roster.waiting = {}
        self._notified |= waiting.keys()
        return [formed, *self._answer(waiting, over)]

    def _answer(self, nodes: dict[str, JoinRequest], over: JobOver) -> list[Work]:
        return [
            Reply(node, arrival.seq, self._fault_decision.with_own_judgement(node, over))
            for node, arrival in nodes.items()
        ]

    # Beginnings.

    def _try_form(self, now: float) -> list[Work]:
        match self._formation.outcome(now):
            case None:
                return []
            case JobOver() as over:
                return self._give_up(over)
            case members:
                self.phase = Phase.RUNNING
                self._roster.form(members)
                self._fault_decision.keep_for(self._roster.waiting)
                return [self.formed(), *self._places()]

    def _places(self) -> list[Work]:
        deputies: list[str] = []
        if not self._rules.hosts:  # else nobody can take over
            deputies = [node for node in self._roster.members if node != self._me][:DEPUTIES]
        decided = self._fault_decision
        places = [
            RankAssigned(
                self._roster.cycle,
                rank,
                self.size,
                self._formation.why,
                *numbers,
                deputy=node in deputies,
                judgement=decided.judgement,
            )
            for rank, (node, numbers) in enumerate(self._roster.numbers().items())
        ]
        active = [arrival.name for arrival in self._roster.members.values()]
        standby = [arrival.name for arrival in self._roster.waiting.values()]
        places[0] = replace(places[0], active=active, standby=standby)
        replies: list[Work] = [
            Reply(node, arrival.seq, decided.with_own_judgement(node, answer))
            for (node, arrival), answer in zip(self._roster.members.items(), places, strict=True)
        ]
        for node in self._roster.members:
            decided.forget_node(node)
        return replies
