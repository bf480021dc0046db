"""Forms the cycles of a job: messages, losses and time in, answers out. Pure.

One coordinator decides for all nodes of a job. `link/coordinator_service.py` runs it on one node of several, under a
lock, and carries out what its methods return (`Work`). `link/local_link.py` runs it for a node that is alone. The
coordinator knows no store, no thread and no clock: a fault that takes weeks to occur is a line of a test.

A job is a series of cycles. The coordinator first waits until it can form one, from the nodes that have arrived. It
answers each member of that cycle with its place, and keeps the others waiting. Then the cycle runs until something ends
it for all its members. Each member stops its ranks and arrives again, with the fault of its ranks if they had one, and
the next cycle forms. The policy is asked once about the faults of a cycle: when all members that are still there have
arrived, or `join_s` has passed. The job is over when all members have succeeded, when the policy gives up, when a rank
asks for it, when too few nodes are left, or when the node that hosts the store leaves or is preempted.

      first arrival          a cycle can form
           |              +--------------------+
           v              |                    v
        FORMING ----------+                 RUNNING ---> OVER: all members succeeded
         |    ^                                | |
         |    +--------------------------------+ +-----> OVER: a request for the end; the store's host leaves
         |      the first failure, loss, preemption
         |      or departure of a member;
         |      a request for a restart; to grow
         |
         +---> OVER: too few nodes; the policy gives up; a request for the end; the store's host leaves

What each event does in each phase:

    event                     FORMING                     RUNNING                        OVER
    arrival of a new node     waits                       waits; the cycle may grow      answered with the end
    arrival of a member       waits                       ends the cycle (1)             answered with the end
    Ended: failed or hung     noted (2)                   ends the cycle (3)             noted
    Ended: succeeded          nothing                     noted; the last ends the job   nothing
    Ended: a request          carried out (4)             carried out                    nothing
    Ended: preempted          not expected back (5)       as a failure (5)               noted
    loss or Left              not expected back (5)       as a failure (5)               noted
    time (`on_tick`)          forms a cycle or gives up   ends the cycle to grow         nothing

    (1) A member arrives only when its ranks are gone: so the cycle has failed there, whatever became of its report.
    (2) Several members may fail at once; the decision about the fault compares them.
    (3) With `Rules.keep_healthy` the cycle goes on without the member while the minimum of nodes is healthy.
    (4) Except one for a restart, which takes place anyway.
    (5) The node that hosts the store ends the job, since the others lose the store with it. Any other member that had
        succeeded is not missed.

Messages about an earlier cycle change nothing: each carries its cycle's number.

A coordinator that takes over begins with the last record (`Formed`) of the one before. That record is written when a
cycle forms and when the job ends, and not in between. So the successor is RUNNING even where the cycle has ended, and
reads the messages of the inbox since the record again, which lead it to the same state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum, auto

from ft_launcher.decide.policy.case import Policy, PolicyJudgement, RankRequest
from ft_launcher.decide.policy.restart_policy import Action, asks_for_restart, is_known
from ft_launcher.job.coordinator.beat_schedule import DEPUTIES
from ft_launcher.job.coordinator.copy_plan import plan_copies
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
    """The phase of the job. The module's docstring says how each event leads from one phase to another."""

    FORMING = auto()
    """No cycle runs; arrivals wait until one can form (`formation.py` says when)."""
    RUNNING = auto()
    """The members of the cycle have their places; other nodes that arrive wait."""
    OVER = auto()
    """The job has ended; each node that arrives receives the same exit code, also from a successor."""


class Coordinator:
    """The state machine of the coordinator. Not thread-safe: its caller holds a lock, or has one thread.

    Each event is a method call, with the time of the event (monotonic seconds); it returns the work that follows, in
    order, which the caller carries out.

    Args:
        me: id of the node on which this coordinator runs.
        rules: how many nodes a cycle may have, and how long to wait for them.
        policy: decides on faults and requests.
        now: the current time.
        previous: the last record of the coordinator before this one; None: this is the first one of its attempt.

    Attributes:
        phase: of the job.
        read: how many messages of the inbox were processed. They are numbered in their order, from 1 on.
        has_left: whether the message by which this coordinator's own node leaves was processed.
    """

    def __init__(self, me: str, rules: Rules, policy: Policy, now: float, previous: Formed | None = None) -> None:
        self.phase = Phase.FORMING
        self.read = 0
        self.has_left = False
        self._me, self._rules = me, rules
        self._roster = Roster(previous)
        self._fault_decision = FaultDecision(policy, now, previous)
        self._formation = Formation(rules, self._roster, self._fault_decision, now, previous)
        self._rank_claims = RankClaims(me, rules.rank_claim_s)
        self._term = 1
        self._preempted_by = 0
        self._ignored: set[str] = set()
        self._leaving: set[str] = set()
        """Nodes that leave and have not said so yet (`Left`): they are preempted, leave as a rank has asked, were
        refused, or are told that the job is over."""
        self._saving: set[str] = set()
        """Those of them that are preempted, and have not arrived since."""
        self._over = JobOver(int(ExitCode.OK), "")
        self._set_aside: dict[int, int] = {}
        """Cycle -> the step from which on states in memory were bad when it was formed."""
        if previous is not None:
            self._take_over(previous)

    def _take_over(self, previous: Formed) -> None:
        self._term, self.read = previous.term + 1, previous.read
        self._set_aside = dict(previous.set_aside)
        self._ignored = {*previous.deposed, previous.coordinator} - {self._me}
        if previous.members:
            self.phase = Phase.RUNNING
        if previous.over is not None:
            self.phase = Phase.OVER
            self._over = previous.over

    @property
    def nodes(self) -> set[str]:
        """The nodes whose beats are to be watched: they take part, wait, or have still to leave. Without those that are
        known to be gone.

        A preempted node is among them while its ranks save, after other nodes have formed the next cycle without it.
        """
        return {arrival.node for arrival in self._roster.present()} | self._leaving

    @property
    def size(self) -> int:
        """How many nodes the current or last cycle has."""
        return len(self._roster.members)

    @property
    def to_leave(self) -> set[str]:
        """Once the job is over: the other nodes that have not left yet, except those that are lost.

        The coordinator's node stays until this is empty, so that all of them can read how the job ended. A preempted
        node does not read that, but sends its `Left`, and would try in vain where the store had ended with this node.
        """
        if self.phase is Phase.OVER:
            return self._leaving - {self._me}
        return set()

    def may_return(self, node: str) -> bool:
        """Returns whether a node that is silent may arrive again; not if it is preempted. To be asked before
        `on_lost`."""
        return node not in self._saving

    def standing(self) -> tuple[int, frozenset[str], frozenset[str]] | None:
        """Returns the number of the cycle that runs, the ids of the nodes that wait meanwhile, and those of the members
        without which the cycle goes on. None: no cycle runs.

        The service compares two results, to publish `members` only when it has changed.
        """
        if self.phase is not Phase.RUNNING:
            return None
        return self._roster.cycle, frozenset(self._roster.waiting), frozenset(self._roster.absent)

    def members(self) -> Members:
        """Returns the host names of the nodes of the current or last cycle, and of the nodes that wait.

        For nodes that ask each other something (`link/questions.py`).
        """
        active = [arrival.name for arrival in self._roster.members.values()]
        waiting = [arrival.name for arrival in self._roster.waiting.values()]
        gone = [rank for rank, node in enumerate(self._roster.members) if node in self._roster.absent]
        return Members(self._roster.cycle, active, waiting, gone)

    @property
    def judgement(self) -> PolicyJudgement | None:
        """What was decided about the fault of the last cycle. None: there was no fault, or nothing is decided yet."""
        return self._fault_decision.judgement

    def formed(self) -> Formed:
        """Returns the record by which another coordinator can take over. The service adds the names of attempts."""
        arrivals = self._roster.members | self._roster.waiting
        cycle = (
            self._roster.cycle,
            self._me,
            self._term,
            self.read,
            list(self._roster.members),
            self._formation.reason,
        )
        if self.phase is Phase.OVER:
            over = self._over
        else:
            over = None
        deposed, set_aside = sorted(self._ignored), self._set_aside
        return Formed(
            *cycle, arrivals, over=over, deposed=deposed, set_aside=set_aside, **self._fault_decision.record()
        )

    def resend(self) -> list[Work]:
        """Returns, after a take-over, what the previous coordinator may have decided and not sent.

        Called once, before the first event. The previous coordinator wrote the record first and answered then. It may
        have died in between, so all answers that follow from the record are given again. A node that has received one
        of them already ignores the second: it has the same key and says the same.
        """
        if self.phase is Phase.RUNNING:
            work: list[Work] = []
            before = self._roster.cycle - 1
            if before >= 0:  # a member that has not received the end of the cycle before still waits for it
                work.append(CycleEnd(before, EndReason.RESTART, self._formation.reason))
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
        """Processes one message of the inbox, and counts it (`read`)."""
        self.read += 1
        match message:
            case JoinRequest():
                return self._arrived(message, now)
            case Ended():
                return self._ended(message, now)
            case Left():
                self._fault_decision.drop(message.node)
                self._leaving.discard(message.node)
                self._saving.discard(message.node)
                return [*self._ranks_ended([message.node]), *self._left(message, now)]

    def on_lost(self, node: str, now: float) -> list[Work]:
        """Processes the loss of a node: it has made no beat for the node timeout, so its own lease has run out."""
        self._fault_decision.drop(node)
        self._leaving.discard(node)
        self._saving.discard(node)
        ended = self._ranks_ended([node])
        return [*ended, *self._node_gone(node, EndReason.LOST, "gave no sign of life", now)]

    def on_tick(self, now: float) -> list[Work]:
        """Processes the passing of time: refuses claims of node ranks, forms or ends a cycle, whatever is due at `now`.

        Called at `next_deadline`. A call at any other time does no harm.
        """
        refused = self._settle_rank_claims(now)
        if self.phase is Phase.FORMING:
            return refused + self._try_form(now)
        if self.phase is Phase.RUNNING and self._formation.grows(now):
            return refused + self._end_cycle(EndReason.GREW, f"{len(self._roster.waiting)} more nodes are here", now)
        return refused

    def next_deadline(self) -> float | None:
        """Returns when `on_tick` is due (monotonic seconds); None if no deadline is set. May change with each event."""
        ends = self._rank_claims.deadlines()
        if self.phase is not Phase.OVER:
            ends += self._formation.deadlines(forming=self.phase is Phase.FORMING)
        return min(ends, default=None)

    def _arrived(self, arrival: JoinRequest, now: float) -> list[Work]:
        """Processes an arrival: refuses it, keeps it, or ends the cycle of a member that has no ranks any more.

        The order of the checks matters. An arrival may be repeated, since its sender cannot know whether a write whose
        answer was lost has succeeded. A node that is to leave must not wait. The end of the job is the answer to all.
        """
        # A superseded coordinator arrives again under a new id; messages under the old one may still be in the inbox.
        if arrival.node in self._ignored:
            return []
        self._saving.discard(arrival.node)
        is_repeated = self._roster.has(arrival)
        gone: list[Work] = []
        if not is_repeated:
            gone = self._ranks_ended([arrival.node])
        dismissal = self._fault_decision.dismissal(arrival.node)
        if dismissal is not None:
            self._leaving.add(arrival.node)
            return [*gone, Reply(arrival.node, arrival.seq, dismissal)]
        if self.phase is Phase.OVER:
            self._leaving.add(arrival.node)
            return [*gone, *self._answer({arrival.node: arrival}, self._over)]
        if is_repeated:
            return []
        if arrival.rank >= self._rules.size.maximum:
            self._leaving.add(arrival.node)
            reason = f"node rank {arrival.rank} is not below the number of nodes, {self._rules.size.maximum}"
            return [Reply(arrival.node, arrival.seq, JobOver(int(ExitCode.BAD_CONFIG), reason))]
        if holder_of(arrival, self._roster.present()) is not None:
            self._rank_claims.add(arrival, now)
            return self._settle_rank_claims(now)
        ending: list[Work] = []
        # A member arrives only when its ranks are gone, so its cycle does not run any more.
        if self.phase is Phase.RUNNING and self._roster.is_active(arrival.node):
            ending = self._end_cycle(EndReason.FAILED, f"node {arrival.name} started again", now)
        self._roster.waiting[arrival.node] = arrival
        return gone + ending + self.on_tick(now)

    def _settle_rank_claims(self, now: float) -> list[Work]:
        """Lets nodes wait for the next cycle whose node rank has become free; returns the refusals of the others whose
        time is up."""
        let_in, refused = self._rank_claims.settle(self._roster.present(), now)
        self._roster.waiting |= {arrival.node: arrival for arrival in let_in}
        self._leaving |= {reply.node for reply in refused}
        return list(refused)

    def _ended(self, ended: Ended, now: float) -> list[Work]:
        """Processes a member's report of how the cycle ended on it, or its wish to end the cycle.

        Reports of failures count after the end of the cycle, too, until the next one forms: the first failure ends the
        cycle, and the decision about the fault needs to know on which other nodes ranks failed, and in which order.
        """
        # A report about an earlier cycle, or by a node that was counted as lost, changes nothing: the others went on.
        if ended.cycle != self._roster.cycle or not self._roster.is_active(ended.node):
            return []
        if ended.reason in (EndReason.FAILED, EndReason.HUNG, EndReason.STOOD_STILL, EndReason.AGREED):
            self._roster.failed.append(ended.node)
        if ended.reason is EndReason.PREEMPTED:
            self._leaving.add(ended.node)
            self._saving.add(ended.node)
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
                self._roster.succeeded.add(ended.node)
                return gone + self._succeed_if_all()
            case EndReason.GREW:  # only from `rendezvous/foreign.py`, which asks the other handler for waiting nodes
                return self._end_cycle(ended.reason, ended.text, now)
        reason = f"node {self._roster.members[ended.node].name}: {ended.text}"
        return self._lose_member(ended.node, ended.reason, reason, now)

    def _asked(self, node: str, asked: RankRequest, text: str, now: float) -> list[Work]:
        """Processes a request of a rank. The rank's node receives the decision with the answer to its next arrival.

        A request counts also where the cycle has ended meanwhile: a rank that asks and exits makes ranks of other nodes
        fail, and their report may arrive first. Only a request for a restart that has been decided on already does not
        count: the restart takes place anyway.
        """
        if self.phase is Phase.OVER or not is_known(asked.request):
            return []
        is_decided = self.phase is Phase.FORMING and self._fault_decision.answer is not None
        if is_decided and asks_for_restart(asked.request):
            return []
        decision = self._fault_decision.decide_request(node, asked, now)
        if decision is None:
            return []
        match decision.action:
            case Action.RESTART if self.phase is Phase.RUNNING:
                return self._end_cycle(EndReason.RESTART, text, now)
            case Action.RESTART:
                return []
            case Action.LEAVE:
                self._leaving.add(node)
                return [*self._ranks_ended([node]), *self._node_gone(node, EndReason.LEFT, text, now)]
            case Action.GIVE_UP:
                code = decision.exit_code or int(ExitCode.JOB_STOPPED)
                if self.phase is Phase.RUNNING:
                    return self._finish(EndReason.STOP, code, text)
                self._leaving |= self._roster.expected
                return self._give_up(JobOver(code, text))

    def _left(self, left: Left, now: float) -> list[Work]:
        """Processes a departure. Where a signal has ended the launcher of a member, the departure is a preemption.

        Such a launcher reports the preemption of its ranks by `Ended` before it leaves, except where it had none: they
        had failed, or were not started. Then this message is the first to say it.
        """
        roster = self._roster
        self.has_left |= left.node == self._me
        is_host = self._rules.hosts and left.node == self._me and roster.cycle != NO_CYCLE
        is_expected = left.node in roster.expected and left.node not in roster.succeeded
        if not left.signal or self.phase is Phase.OVER or not (is_host or is_expected):
            return self._node_gone(left.node, EndReason.LEFT, left.reason, now)
        self._rank_claims.remove(left.node)
        return self._preempted(left.node, left.signal, left.reason, now)

    def _preempted(self, node: str, number: int, reason: str, now: float) -> list[Work]:
        """Processes a preemption: node `node` got the signal `number`. The others go on without it if they are enough.

        They do not wait for it: a scheduler that preempts a node may not give it back. The preemption of the node that
        hosts the store is the end of the job, since nobody can go on without the store.
        """
        roster = self._roster
        arrival = roster.waiting.pop(node, None) or roster.members.get(node)
        name = node
        # The store's host may be neither a member nor wait: it was late, and the others formed a cycle without it.
        if arrival is not None:
            name = arrival.name
        roster.absent[node] = EndReason.PREEMPTED
        gone = self._ranks_ended(roster.without_ranks)
        if self.phase is Phase.OVER:
            return gone
        reason = f"node {name} is preempted: {reason}"
        self._formation.preempted = reason
        self._preempted_by = number
        if self._rules.hosts and node == self._me:
            return gone + self._finish(EndReason.PREEMPTED, int(ExitCode.PREEMPTED), reason)
        if self.phase is Phase.RUNNING:
            return gone + self._lose_member(node, EndReason.PREEMPTED, reason, now)
        return gone + self.on_tick(now)

    def _ranks_ended(self, nodes: Iterable[str]) -> list[Work]:
        """Returns a `RanksEnded` for each of these nodes that is a member of the cycle, where a member is preempted.

        A preempted node that hosts a store stays until the ranks of all other members have ended, for they would lose
        the store while they save. Members that receive the news of the preemption report that end themselves. `nodes`
        may not have received it: they are lost, have left, had succeeded, or arrived again after a fault. So the
        coordinator reports the end of their ranks; else the preempted node would wait for them in vain.
        """
        roster = self._roster
        if EndReason.PREEMPTED not in roster.absent.values():
            return []
        ranks = {node: rank for rank, node in enumerate(roster.members)}
        return [RanksEnded(roster.cycle, ranks[node]) for node in nodes if node in ranks]

    def _node_gone(self, node: str, end_reason: EndReason, reason: str, now: float) -> list[Work]:
        """Processes that a node is gone: `end_reason` is LOST or LEFT, and `reason` says why in words.

        A member that had succeeded is not missed. Where a node was only waiting, another look at what can form is all.
        """
        roster = self._roster
        roster.waiting.pop(node, None)
        self._rank_claims.remove(node)
        if self._rules.hosts and node == self._me and self.phase is not Phase.OVER:
            reason = f"the node that hosts the store left: {reason}"
            return self._finish(EndReason.LEFT, int(ExitCode.STORE_HOST_LOST), reason)
        if node not in roster.expected:
            return self.on_tick(now)
        if self.phase is not Phase.RUNNING or node in roster.succeeded:
            roster.absent[node] = end_reason
            return self.on_tick(now)
        if end_reason is EndReason.LEFT:
            verb = "left"
        else:
            verb = "is lost"
        return self._lose_member(node, end_reason, f"node {roster.members[node].name} {verb}: {reason}", now)

    def _lose_member(self, node: str, end_reason: EndReason, reason: str, now: float) -> list[Work]:
        """Ends the cycle since a member failed or is gone; goes on without the member where the rules say so.

        The member is `absent` from here on: this decides whether enough healthy members are left, and which reports
        still count. Where the cycle ends, `Roster.end` removes a member that failed from `absent`: it is to arrive
        again. One that is lost, has left or is preempted stays in, and no cycle waits for it.
        """
        self._roster.absent[node] = end_reason
        if self._rules.keep_healthy and len(self._roster.active) >= self._rules.size.minimum:
            return self._succeed_if_all()
        return self._end_cycle(end_reason, reason, now)

    def _succeed_if_all(self) -> list[Work]:
        if self._roster.all_succeeded:
            return self._finish(EndReason.SUCCEEDED, int(ExitCode.OK), "all ranks succeeded")
        return []

    # Endings.

    def _end_cycle(self, end_reason: EndReason, reason: str, now: float) -> list[Work]:
        """Ends the cycle for all its members, and tries at once to form the next: all that is needed may be there."""
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
        """Ends cycle and job: members receive a `CycleEnd` with the exit code, nodes that wait a `JobOver`."""
        self._leaving |= self._roster.expected
        return [self._cycle_end(end_reason, reason, exit_code), *self._give_up(JobOver(exit_code, reason))]

    def _give_up(self, over: JobOver) -> list[Work]:
        """Ends the job where no cycle runs (any more), and answers all nodes that wait.

        The record comes first in the returned work: a successor must know of the end before any node does.
        """
        self.phase = Phase.OVER
        self._over = over
        self._roster.waiting |= self._rank_claims.pop_all()
        formed = self.formed()
        waiting = self._roster.waiting
        self._roster.waiting = {}
        self._leaving |= waiting.keys()
        return [formed, *self._answer(waiting, over)]

    def _answer(self, nodes: dict[str, JoinRequest], over: JobOver) -> list[Work]:
        """Returns the end of the job as the answer to each of these arrivals."""
        return [
            Reply(node, arrival.seq, self._fault_decision.with_own_judgement(node, over))
            for node, arrival in nodes.items()
        ]

    # Beginnings.

    def _try_form(self, now: float) -> list[Work]:
        """Forms a cycle if that can be done now, or gives up; does nothing where more nodes are to be awaited."""
        match self._formation.decide(now):
            case None:
                return []
            case JobOver() as over:
                return self._give_up(over)
            case members:
                self.phase = Phase.RUNNING
                self._roster.form(members)
                self._fault_decision.keep_for(self._roster.waiting)
                judgement = self._fault_decision.judgement
                if judgement is not None and judgement.decision.set_aside_from:
                    self._set_aside[self._roster.cycle] = judgement.decision.set_aside_from
                return [self.formed(), *self._places()]

    def _places(self) -> list[Work]:
        """Returns the answers to the members of a cycle that has formed: the place of each, and its ranks' numbers.

        Only the answer to rank 0 contains the names of all nodes: with a copy for each of n nodes the coordinator would
        write n * n names. A judgement that is kept for a node goes out with its answer, and is dropped.
        """
        deputies: list[str] = []
        if not self._rules.hosts:  # else the store ends with the coordinator's node, and nobody can take over
            deputies = [node for node in self._roster.members if node != self._me][:DEPUTIES]
        decided = self._fault_decision
        members, waiting, numbers = self._roster.members, self._roster.waiting, self._roster.numbers()
        first_ranks = [of_node[0] for of_node in numbers.values()]
        copies = plan_copies(list(members.values()), list(waiting.values()), first_ranks, self._set_aside)
        places = [
            RankAssigned(
                self._roster.cycle,
                rank,
                self.size,
                self._formation.reason,
                *of_node,
                deputy=node in deputies,
                judgement=decided.judgement,
                copies=copies.get(node),
            )
            for rank, (node, of_node) in enumerate(numbers.items())
        ]
        active = [arrival.name for arrival in members.values()]
        standby = [arrival.name for arrival in waiting.values()]
        places[0] = replace(places[0], active=active, standby=standby)
        replies: list[Work] = [
            Reply(node, arrival.seq, decided.with_own_judgement(node, answer))
            for (node, arrival), answer in zip(members.items(), places, strict=True)
        ]
        for node in members:
            decided.drop(node)
        return replies
