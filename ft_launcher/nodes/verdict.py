"""What was decided about the fault that ended the last cycle, and which nodes have still to hear of it. Pure.

Knows no phase and no members; the coordinator asks it when a cycle is to form.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ft_launcher.nodes import cause
from ft_launcher.nodes.messages import Formed, Over, Place
from ft_launcher.nodes.terms import Case, Judge, Judgement
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.exit_codes import ExitCode

_A = TypeVar("_A", Place, Over)


class Verdict:
    """The last judgement, the history of restarts, and what is owed to nodes that were not placed since.

    Args:
        judge: the restart policy.
        in_vain: so many cycles in a row that fail without a failed rank end the job.
        now: this moment.
        former: what another coordinator wrote down last.
    """

    def __init__(self, judge: Judge, in_vain: int, now: float, former: Formed | None) -> None:
        self._judge, self._most_in_vain, self._history_at = judge, in_vain, now
        self.history: dict[str, Any] = former.history if former else {}
        self.owed: dict[str, dict[str, Any]] = dict(former.owed) if former else {}
        self.judgement: Judgement | None = None
        self.culprit = ""
        self._in_vain = 0
        if former is not None and former.members:
            self.judgement = Judgement(former.reason, None, former.decision, former.history)
            self.culprit = former.fault_of

    def record(self) -> dict[str, Any]:
        """What `Formed` holds of it."""
        return {
            "history": self.history,
            "decision": self.decision,
            "fault_of": self.culprit,
            "owed": dict(self.owed),
        }

    def forget(self) -> None:
        """A cycle has ended that is to be judged."""
        self.judgement, self.culprit = None, ""

    def find(
        self, faults: Mapping[str, cause.Fault], told: bool, gone: bool, places: tuple[bool, bool], why: str, now: float
    ) -> Judgement:
        """Judges the cycle that ended; keeps what it found.

        Args:
            faults: those that nodes brought, by node, the first to tell of one first.
            told: whether a node said that the cycle failed on it.
            gone: whether a node was lost or left.
            places: whether a node waits that could take the faulty one's place; whether a member could change with it.
            why: why the cycle ended.
        """
        culprit = cause.culprit(faults, gone)
        self._in_vain = self._in_vain + 1 if told and culprit is None and not gone else 0
        self.culprit = culprit or ""
        if culprit is not None:
            self.judgement = self._ask(cause.as_one(faults[culprit], faults.values()), places, now)
        elif self._in_vain >= self._most_in_vain:
            reason = f"{self._in_vain} cycles in a row could not begin: {why}"
            self.judgement = Judgement(reason, int(ExitCode.RENDEZVOUS_FAILED), {}, self.history)
        else:
            self.judgement = Judgement(why, None, {}, self.history)
        return self.judgement

    def _ask(self, fault: dict[str, Any], places: tuple[bool, bool], now: float) -> Judgement:
        try:
            judgement = self._judge(Case(fault, self.history, now - self._history_at, *places), now)
        except ProtocolError as error:
            judgement = Judgement(str(error), int(ExitCode.LAUNCHER_ERROR), {}, self.history)
        self._history_at, self.history = now, judgement.history
        return judgement

    @property
    def moves(self) -> bool:
        """Whether another node is to have the culprit's place."""
        return self.judgement is not None and self.judgement.moves

    @property
    def may_exchange(self) -> bool:
        """Whether that may be another member."""
        return self.judgement is not None and self.judgement.exchange

    @property
    def decision(self) -> dict[str, Any]:
        """The decision; empty: there is none."""
        return self.judgement.decision if self.judgement is not None else {}

    def owe(self, waiting: Collection[str]) -> None:
        """The culprit, if it is among those that wait on, has still to hear what was decided."""
        if self.culprit in waiting:
            self.owed[self.culprit] = self.decision

    def told(self, node: str, answer: _A) -> _A:
        """The answer to a node; with the decision about its fault where it had to wait since then."""
        decision = self.owed.pop(node, None)
        return answer if decision is None else replace(answer, decision=decision, fault_of=node)
