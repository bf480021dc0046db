"""The decisions about the fault that ended the last cycle, and about requests of ranks. Pure.

Says whose the fault was, what follows, and which node is to be notified. Knows no phase and changes no member.
`formation.py` asks for the decision about a fault when a cycle is to form; `coordinator.py` asks for the decision about
a request when the request arrives.

Several nodes may report a fault of the same cycle. `find_faulty_node` picks the report that counts, and the policy
judges that one only. The judgement goes to all members of the next cycle with their places. Two kinds of judgements
cannot go out at once, since their node has no answer to receive yet: that of a faulty node which goes on waiting while
others take its place, and that about a request. `FaultDecision.undelivered` has them until the node's next answer.

The history of restarts, of which the budget is a part, moves with the coordinator: `Formed` contains it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ft_launcher.decide.policy.case import (
    Case,
    FaultReport,
    Policy,
    PolicyAnswer,
    PolicyJudgement,
    RankRequest,
    RequestCase,
)
from ft_launcher.decide.policy.restart_policy import Action, Decision
from ft_launcher.job.coordinator.node_messages import Formed, JobOver, RankAssigned
from ft_launcher.job.coordinator.roster import Roster
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.exit_codes import ExitCode

_A = TypeVar("_A", RankAssigned, JobOver)

MAX_FAILED_STARTS = 3
"""So many cycles in a row that fail without a failed rank end the job. For instance, no node can reach the store of any
cycle: more tries would not help, and such failures charge no budget that would end them."""

Reports = Mapping[str, FaultReport | None]
"""Node -> the fault of its ranks; None: none of them failed by itself. In the order in which the nodes reported."""


class FaultDecision:
    """The last answer of the policy, the history of restarts, and judgements that wait for their node's next arrival.

    Args:
        policy: the restart policy (`decide/policy/job_policy.py: JobPolicy`).
        now: the current time (monotonic seconds).
        previous: the last record of the coordinator before this one; None: there was none.

    Attributes:
        history: the history of restarts, as JSON values; its ages were true when the policy was last asked.
        undelivered: node -> the judgement that its next answer is to carry.
        answer: what was decided about the last cycle; None: it is not decided yet.
        faulty_node: the node of the fault; empty: there was no fault, or it is not decided yet.
    """

    def __init__(self, policy: Policy, now: float, previous: Formed | None) -> None:
        self._policy = policy
        self._history_at = now
        self.history: dict[str, Any] = {}
        self.undelivered: dict[str, PolicyJudgement] = {}
        self.answer: PolicyAnswer | None = None
        self.faulty_node = ""
        self._failed_starts = 0
        if previous is not None:
            self.history = previous.history
            self.undelivered = dict(previous.owed)
        if previous is not None and previous.members:
            self.answer = PolicyAnswer(
                previous.reason, exit_code=None, judgement=previous.judgement, history=previous.history
            )
            if previous.judgement is not None:
                self.faulty_node = previous.judgement.node

    def record(self) -> dict[str, Any]:
        """Returns the fields of `Formed` that describe this decision, for a successor."""
        return {"history": self.history, "judgement": self.judgement, "owed": dict(self.undelivered)}

    def reset(self) -> None:
        """Forgets the answer: another cycle has ended, and its fault is to be decided on."""
        self.answer = None
        self.faulty_node = ""

    def decide(self, roster: Roster, end_reason: str, now: float) -> PolicyAnswer:
        """Decides on the cycle that ended, by the policy if a node had a fault; stores the answer and returns it.

        Without a fault of a rank the job goes on and nothing is charged: nodes came, left or were lost. An exception
        are cycles that failed without a failed rank, `MAX_FAILED_STARTS` in a row.

        Args:
            roster: the nodes, with the faults that they have reported.
            end_reason: why the cycle ended, in words.
            now: the current time (monotonic seconds).
        """
        # A rank that asks for a restart and exits is gone for the ranks of other nodes, as those of a lost node are. (A
        # node that leaves by request is absent; its judgement may wait here longer than for one cycle.)
        requests = [judgement for judgement in self.undelivered.values() if judgement.answers_request]
        was_asked = any(judgement.decision.action is Action.RESTART for judgement in requests)
        reports, gone = roster.reports(), was_asked or bool(roster.absent)
        faulty_node = find_faulty_node(reports, gone)
        cause = reports.get(faulty_node or "")
        # A failure without a failed rank: for instance, no node could reach the store of the cycle.
        failed_to_start = bool(roster.failed) and cause is None and not gone
        if failed_to_start:
            self._failed_starts += 1
        else:
            self._failed_starts = 0
        if cause is not None and faulty_node is not None:
            case = Case(
                combined(cause, reports.values()),
                self.history,
                age_s=now - self._history_at,
                other_hardware=len(roster.waiting) > len(roster.members),
                views=roster.node_views(),
            )
            self.answer = self._ask(case, faulty_node, now)
        elif self._failed_starts >= MAX_FAILED_STARTS:
            reason = f"{self._failed_starts} cycles in a row could not begin: {end_reason}"
            self.answer = PolicyAnswer(reason, int(ExitCode.RENDEZVOUS_FAILED), judgement=None, history=self.history)
        else:
            self.answer = PolicyAnswer(end_reason, exit_code=None, judgement=None, history=self.history)
        return self.answer

    def decide_request(self, node: str, asked: RankRequest, now: float) -> Decision | None:
        """Decides on a request of a rank, and keeps the judgement for the rank's node. Charges no restart.

        Returns None where the history, which another coordinator wrote, cannot be read: then nothing follows.
        """
        try:
            answer = self._policy(RequestCase(asked, self.history, now - self._history_at), now)
        except ProtocolError:
            return None
        if answer.judgement is None:
            return None
        self.undelivered[node] = replace(answer.judgement, node=node)
        return answer.judgement.decision

    def dismissal(self, node: str) -> JobOver | None:
        """Returns the answer to a node that is to leave because one of its ranks has asked for that; else None.

        Asked for at each arrival: such a node gets no further place, though it arrives as any other does.
        """
        judgement = self.undelivered.get(node)
        if judgement is None or judgement.decision.action is not Action.LEAVE:
            return None
        decision = judgement.decision
        return JobOver(decision.exit_code or int(ExitCode.NODE_EXCLUDED), decision.reason, judgement)

    def _ask(self, case: Case, node: str, now: float) -> PolicyAnswer:
        """Asks the policy about the fault that `node` reported. The policy may find the culprit on another node.

        A history that cannot be read ends the job: without it the budget could be exceeded without end.
        """
        try:
            answer = self._policy(case, now)
        except ProtocolError as error:
            answer = PolicyAnswer(str(error), int(ExitCode.LAUNCHER_ERROR), judgement=None, history=self.history)
        self._history_at = now
        self.history = answer.history
        self.faulty_node = answer.faulty_node or node
        if answer.judgement is None:
            return answer
        return replace(answer, judgement=replace(answer.judgement, node=self.faulty_node))

    @property
    def judgement(self) -> PolicyJudgement | None:
        """What was decided about the fault; None where there was none, or before it is decided."""
        if self.answer is not None:
            return self.answer.judgement
        return None

    def keep_for(self, waiting: Collection[str]) -> None:
        """Keeps the judgement for `faulty_node` if it is among the nodes that go on waiting."""
        if self.judgement is not None and self.faulty_node in waiting:
            self.undelivered[self.faulty_node] = self.judgement

    def drop(self, node: str) -> None:
        """Drops the judgement that is kept for a node: the node has received it, or is gone."""
        self.undelivered.pop(node, None)

    def with_own_judgement(self, node: str, answer: _A) -> _A:
        """Returns the answer to a node; with the judgement about its own fault or request, if one was kept for it."""
        judgement = self.undelivered.get(node)
        if judgement is None:
            return answer
        return replace(answer, judgement=judgement)


def find_faulty_node(reports: Reports, gone: bool) -> str | None:
    """Returns the node whose fault is the cause; None if no fault needs a decision. In this order:

    1. The node of a suspect result, where all ranks exit because of that result.
    2. The first node that reported a fault which is no consequence of another (`Fault.collateral`).
    3. The first node with a consequence of a fault, where no node is gone: a lost node would explain it.

    Args:
        reports: the faults, first report first.
        gone: whether a node was lost or left, or a rank exited after a request.
    """
    found = {node: report.fault for node, report in reports.items() if report is not None}
    own = [node for node, fault in found.items() if not fault.collateral]
    own = [node for node in own if found[node].doubt is not None] or own
    if not own and not gone:
        own = list(found)
    return next(iter(own), None)


def combined(cause: FaultReport, reports: Collection[FaultReport | None]) -> FaultReport:
    """Returns the cause. Its `agreed_exit_code` is kept only if all faults that are no consequence have the same code.

    A launcher that gives up may end with that code, so the failed ranks of all nodes must have it in common. The report
    of one node only knows that its own ranks have.
    """
    own = [report.fault for report in reports if report is not None and not report.fault.collateral]
    code = cause.fault.agreed_exit_code
    if all(fault.agreed_exit_code == code for fault in own):
        return cause
    return replace(cause, fault=replace(cause.fault, agreed_exit_code=None))
