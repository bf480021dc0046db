"""The decision about the fault that ended the last cycle: whose it was, what follows, and who is to be notified. Pure.

Knows no phase and no members; the coordinator asks it when a cycle is to form.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from ft_launcher.nodes.node_messages import Formed, JobOver, RankAssigned
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.exit_codes import ExitCode

_A = TypeVar("_A", RankAssigned, JobOver)

MOST_FAILED_STARTS = 3
"""So many cycles in a row that fail without a failed rank end the job; for instance because no node reaches their
store."""

Fault = Mapping[str, Any]
"""A node's fault as JSON; empty: it had none."""


@dataclass(frozen=True)
class PolicyAnswer:
    """What follows a fault: go on (`exit_code` None), after `wait_s`, or give up; and the new history of restarts.

    `faulty_node`: another node's rank held up those of the node whose fault it was; empty: none did.
    `relocates`: a waiting node, if there is one, is to take the faulty one's place.
    """

    reason: str
    exit_code: int | None
    decision: dict[str, Any]
    history: dict[str, Any]
    wait_s: float = 0.0
    relocates: bool = False
    faulty_node: str = ""


@dataclass(frozen=True)
class NodeViews:
    """What the nodes saw of their ranks when the cycle ended: where they were, if by a hang, and which had returned.

    Attributes:
        ranks: after a hang, by node, JSON that `attribution/rank_view.py: of_record` reads; else empty.
        names: of these nodes.
        is_complete: these are all nodes of the cycle.
        nccl: by node, what NCCL said of the job there, JSON that `attribution/nccl_view.py: of_record` reads; None, or
            no entry: nothing.
        returned: by rank, how many seconds before its node stopped its ranks it had returned from the program.
    """

    ranks: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    is_complete: bool = False
    nccl: Mapping[str, Any] = field(default_factory=dict)
    returned: Mapping[int, float] = field(default_factory=dict)


NO_VIEWS = NodeViews()


@dataclass(frozen=True)
class Case:
    """The question to the policy: a fault, and the history of restarts as it was `age_s` seconds ago.

    `elsewhere`: a node waits that could take the faulty one's place.
    `views`: what the nodes saw of their ranks.
    """

    fault: dict[str, Any]
    history: dict[str, Any]
    age_s: float
    elsewhere: bool
    views: NodeViews = NO_VIEWS


Policy: TypeAlias = Callable[[Case, float], PolicyAnswer]
"""Case, now -> answer. The coordinator gets the restart policy as a function, and imports none."""


class FaultDecision:
    """The last answer of the policy, the history of restarts, and decisions not yet sent to nodes without a place.

    Args:
        policy: the restart policy.
        now: the current time.
        former: the last record of the former coordinator.
    """

    def __init__(self, policy: Policy, now: float, former: Formed | None) -> None:
        self._policy = policy
        self._history_at = now
        self.history: dict[str, Any] = {}
        self.kept: dict[str, dict[str, Any]] = {}
        self.answer: PolicyAnswer | None = None
        self.faulty_node = ""
        self._failed_starts = 0
        if former is not None:
            self.history = former.history
            self.kept = dict(former.owed)
        if former is not None and former.members:
            self.answer = PolicyAnswer(former.reason, None, former.decision, former.history)
            self.faulty_node = former.fault_of

    def record(self) -> dict[str, Any]:
        """Returns the fields of `Formed` that describe it."""
        return {
            "history": self.history,
            "decision": self.decision,
            "fault_of": self.faulty_node,
            "owed": dict(self.kept),
        }

    def forget(self) -> None:
        """Forgets the answer: another cycle has ended, and its fault is to be decided on."""
        self.answer = None
        self.faulty_node = ""

    def decide(
        self,
        faults: Mapping[str, Fault],
        reported: bool,
        gone: bool,
        has_spare: bool,
        why: str,
        now: float,
        views: NodeViews = NO_VIEWS,
    ) -> PolicyAnswer:
        """Decides on the cycle that ended, by the policy if a node had a fault; keeps the answer.

        Args:
            faults: by node, in the order in which nodes reported them.
            reported: whether a node reported that the cycle failed on it.
            gone: whether a node was lost or left.
            has_spare: whether a node waits that could take the faulty one's place.
            why: why the cycle ended.
            views: what the nodes saw of their ranks.
        """
        faulty_node = find_faulty_node(faults, gone)
        # A failure without a failed rank: for instance, no node could reach the store of the cycle.
        failed_to_start = reported and faulty_node is None and not gone
        if failed_to_start:
            self._failed_starts += 1
        else:
            self._failed_starts = 0
        self.faulty_node = faulty_node or ""
        if faulty_node is not None:
            self.answer = self._ask(combined(faults[faulty_node], faults.values()), has_spare, now, views)
            self.faulty_node = self.answer.faulty_node or faulty_node
        elif self._failed_starts >= MOST_FAILED_STARTS:
            reason = f"{self._failed_starts} cycles in a row could not begin: {why}"
            self.answer = PolicyAnswer(reason, int(ExitCode.RENDEZVOUS_FAILED), {}, self.history)
        else:
            self.answer = PolicyAnswer(why, None, {}, self.history)
        return self.answer

    def _ask(self, fault: dict[str, Any], has_spare: bool, now: float, views: NodeViews) -> PolicyAnswer:
        try:
            answer = self._policy(Case(fault, self.history, now - self._history_at, has_spare, views), now)
        except ProtocolError as error:
            answer = PolicyAnswer(str(error), int(ExitCode.LAUNCHER_ERROR), {}, self.history)
        self._history_at = now
        self.history = answer.history
        return answer

    @property
    def decision(self) -> dict[str, Any]:
        """The decision as JSON; empty when there is none."""
        if self.answer is not None:
            return self.answer.decision
        return {}

    def keep_for(self, waiting: Collection[str]) -> None:
        """Keeps the decision for `faulty_node` if it is among the nodes that go on waiting."""
        if self.faulty_node in waiting:
            self.kept[self.faulty_node] = self.decision

    def with_own_decision(self, node: str, answer: _A) -> _A:
        """Returns the answer to a node, with the decision about its fault if that was kept for it."""
        decision = self.kept.pop(node, None)
        if decision is None:
            return answer
        return replace(answer, decision=decision, fault_of=node)


def find_faulty_node(faults: Mapping[str, Fault], gone: bool) -> str | None:
    """Returns the node whose fault is the cause: the first that failed by itself; None if there is no such node.

    Consequences of other faults count only where no node is gone, since a lost node explains them. Where all ranks
    exit because of a suspect result, it is the node of that result.

    Args:
        faults: by node, in the order in which nodes reported them.
        gone: whether a node was lost or left.
    """
    own = [node for node, fault in faults.items() if _own(fault)]
    own = [node for node in own if faults[node].get("doubt")] or own
    if not own and not gone:
        own = [node for node, fault in faults.items() if fault]
    return next(iter(own), None)


def combined(cause: Fault, all_faults: Collection[Fault]) -> dict[str, Any]:
    """Returns the cause; its `agreed_exit_code` is kept only if all faults that are no consequence have the same."""
    code = cause.get("agreed_exit_code")
    agree = all(fault.get("agreed_exit_code") == code for fault in all_faults if _own(fault))
    if not agree:
        code = None
    return {**cause, "agreed_exit_code": code}


def _own(fault: Fault) -> bool:
    """Whether there is a fault that is not the consequence of another node's."""
    return bool(fault) and not fault.get("collateral")
