"""What becomes of nodes that wait: a cycle, the end of the job, or nothing yet; whether they are enough. Pure.

Knows no messages: the coordinator tells who came, and carries out what is decided.
"""

from __future__ import annotations

from ft_launcher.nodes.membership import choose, how_many
from ft_launcher.nodes.messages import NO_CYCLE, Arrive, Formed, Over
from ft_launcher.nodes.moves import can_exchange, choose_moved
from ft_launcher.nodes.roster import Roster
from ft_launcher.nodes.terms import Rules
from ft_launcher.nodes.verdict import Verdict
from rank_monitor.contract.exit_codes import ExitCode


class Formation:
    """Of the next cycle. `why` there is to be one; `preempted` says which member was, since the last formed.

    Args:
        rules: how many nodes, and how long to wait for them.
        roster: the nodes.
        verdict: what was decided about the fault that ended the last cycle; asked once for each.
        now: this moment.
        former: what another coordinator wrote down last.
    """

    def __init__(self, rules: Rules, roster: Roster, verdict: Verdict, now: float, former: Formed | None) -> None:
        self._rules, self._roster, self._verdict = rules, roster, verdict
        self.why = (former.reason if former else "") or "the first nodes came"
        self.preempted = ""
        self._since = self._not_before = now
        self._enough_since: float | None = None

    def begin(self, why: str, now: float) -> None:
        """The cycle has ended, and that is to be judged."""
        self.why, self._since, self._not_before, self._enough_since = why, now, now, None
        self._verdict.forget()

    def deadlines(self, forming: bool) -> list[float]:
        """When time alone changes what `outcome` says, or `grows` where no cycle is forming."""
        ends = [max(self._since + self._rules.join_s, self._not_before)] if forming else []
        if self._enough_since is not None:
            ends.append(max(self._enough_since + self._last_call_s(forming), self._not_before))
        return ends

    def grows(self, now: float) -> bool:
        """Whether those who wait are reason enough to end a healthy cycle now.

        A cycle in which a node is done with its work does not begin again for that.
        """
        roster, size, after = self._roster, self._rules.size, 0
        if roster.waiting and size.may_grow and not roster.done:
            after = how_many((roster.living | roster.waiting).values(), len(roster.members), size)
        return self._is_due(after if after > len(roster.members) else 0, False, now)

    def outcome(self, now: float) -> list[Arrive] | Over | None:
        """The members of the next cycle by rank, or why the job is over; None: wait."""
        roster, overdue = self._roster, now >= self._since + self._rules.join_s
        if not overdue and not roster.complete:
            return None
        if self._verdict.judgement is None and (over := self._judge(now)) is not None:
            return over
        due = self._is_due(how_many(roster.waiting.values(), len(roster.members), self._rules.size), True, now)
        if self._enough_since is None:
            return self._too_few() if overdue or self.preempted else None
        if not (due or overdue) or now < self._not_before:
            return None
        self._enough_since, self.preempted = None, ""
        return self._chosen()

    def _is_due(self, count: int, forming: bool, now: float) -> bool:
        """Whether so many, 0 for too few, wait for nobody else. Sets the moment they became enough."""
        if count == 0:
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        return count == self._rules.size.maximum or now >= self._enough_since + self._last_call_s(forming)

    def _last_call_s(self, forming: bool) -> float:
        return 0.0 if forming and self._roster.living else self._rules.last_call_s

    def _judge(self, now: float) -> Over | None:
        """Has the fault judged that ended the cycle; why the job is over, if it is by that."""
        roster, verdict = self._roster, self._verdict
        places = len(roster.waiting) > len(roster.members), can_exchange(roster.waiting.values(), roster.members)
        judged = verdict.find(roster.faults(), bool(roster.failed), bool(roster.away), places, self.why, now)
        self.why, self._not_before = judged.reason, now + judged.wait_s
        if judged.exit_code is None:
            return None
        return Over(judged.exit_code, judged.reason, judged.decision, verdict.culprit)

    def _chosen(self) -> list[Arrive]:
        """The members of the next cycle; where ranks are to move, on other hardware."""
        came, former, size = list(self._roster.waiting.values()), list(self._roster.members), self._rules.size
        if self._verdict.moves:
            return choose_moved(came, former, size, self._verdict.culprit, self._verdict.may_exchange)
        return choose(came, former, size)

    def _too_few(self) -> Over:
        size = self._rules.size
        if self.preempted:
            return Over(int(ExitCode.PREEMPTED), f"{self.preempted}, and the others are too few without it")
        text = f"{len(self._roster.waiting)} of at least {size.minimum} nodes came within {self._rules.join_s:g} s"
        if self._rules.hint:
            text = f"{text}; {self._rules.hint}"
        first = self._roster.cycle == NO_CYCLE
        return Over(int(ExitCode.RENDEZVOUS_FAILED if first else ExitCode.BELOW_MINIMUM), text)
