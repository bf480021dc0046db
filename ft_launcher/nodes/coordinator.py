"""Forms the cycles of a job of several nodes: messages, losses and time in, answers out. Pure.

Knows no store, no thread and no clock, so a fault that takes weeks to occur is a line of a test.

    FORMING   who came is kept until a cycle can form: at once when all of the last cycle that live are back, or the
              maximum is there; else `last_call_s` after the minimum was reached. Too few for `join_s`: OVER.
    RUNNING   ended by the first failure, loss or departure of a member, by a request, or to grow: FORMING.
              All members succeeded, or one asked to stop: OVER.
    OVER      whoever comes is told so, by whoever takes over too.

An ended cycle's messages change nothing later: each carries its cycle's number.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from enum import Enum, auto
from typing import Any, TypeVar

from ft_launcher.nodes import cause
from ft_launcher.nodes.membership import choose, how_many
from ft_launcher.nodes.messages import (
    NO_CYCLE,
    NO_RANK,
    Arrive,
    CycleEnd,
    Ended,
    Formed,
    Gone,
    How,
    Over,
    Place,
    ToCoordinator,
    arrivals_of,
    over_of,
)
from ft_launcher.nodes.terms import Case, Judge, Judgement, Reply, Rules, Work
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.exit_codes import ExitCode

_A = TypeVar("_A", Place, Over)


class Phase(Enum):
    """Where the job is."""

    FORMING = auto()
    RUNNING = auto()
    OVER = auto()


class Coordinator:
    """The machine. `read` counts the messages taken so far, in the inbox's order."""

    def __init__(self, me: str, rules: Rules, judge: Judge, now: float, former: Formed | None = None) -> None:
        self.phase = Phase.FORMING
        self.read = 0
        self._me, self._rules, self._judge = me, rules, judge
        self._term = 1
        self._cycle = NO_CYCLE
        self._members: dict[str, Arrive] = {}
        self._waiting: dict[str, Arrive] = {}
        self._doubtful: dict[str, tuple[Arrive, float]] = {}
        self._away: dict[str, How] = {}
        self._done: set[str] = set()
        self._ignored: set[str] = set()
        self._told: set[str] = set()
        self._first_fault: list[str] = []
        self._history: dict[str, Any] = {}
        self._history_at = now
        self._why = "the first nodes came"
        self._since = now
        self._enough_since: float | None = None
        self._not_before = now
        self._judged: tuple[Judgement, str] | None = None
        self._owed: dict[str, dict[str, Any]] = {}
        self._over = Over(int(ExitCode.OK), "")
        if former is not None:
            self._take_over(former)

    def _take_over(self, former: Formed) -> None:
        self._term = former.term + 1
        self._cycle, self.read, self._history = former.cycle, former.read, former.history
        self._why = former.reason or self._why
        arrivals = arrivals_of(former)
        self._members = {node: arrivals.pop(node) for node in former.members}
        self._waiting = arrivals
        self._ignored = {former.coordinator} - {self._me}
        if self._members:
            self.phase = Phase.RUNNING
        if (over := over_of(former)) is not None:
            self.phase, self._over = Phase.OVER, over

    @property
    def nodes(self) -> set[str]:
        """Everybody who is taking part or waiting, or has still to leave, as far as they are not known to be gone."""
        return {node for node in self._members if node not in self._away} | set(self._waiting) | self.to_leave

    @property
    def to_leave(self) -> set[str]:
        """Once the job is over: the other nodes that were told and have not left yet."""
        return self._told - {self._me} if self.phase is Phase.OVER else set()

    def formed(self) -> Formed:
        """What another coordinator needs to take over."""
        arrivals = {node: asdict(came) for node, came in (self._members | self._waiting).items()}
        members = list(self._members)
        over = asdict(self._over) if self.phase is Phase.OVER else {}
        return Formed(self._cycle, self._me, self._term, self.read, members, self._why, arrivals, self._history, over)

    def retell(self) -> list[Work]:
        """After a take-over: what the coordinator before may have agreed on and not told; harmless to tell again."""
        if self.phase is Phase.RUNNING:
            return self._places()
        if self.phase is Phase.FORMING:
            return []
        how = How.SUCCEEDED if self._over.exit_code == ExitCode.OK else How.STOP
        everybody, self._waiting = self._members | self._waiting, {}
        ended = CycleEnd(self._cycle, how.value, self._over.reason, self._over.exit_code)
        return [ended, *(Reply(node, came.seq, self._over) for node, came in everybody.items())]

    # Events.

    def on(self, message: ToCoordinator, now: float) -> list[Work]:
        """Takes one message of the inbox."""
        self.read += 1
        match message:
            case Arrive():
                return self._arrived(message, now)
            case Ended():
                return self._part_ended(message, now)
            case Gone():
                return self._away_now(message.node, How.LEFT, message.reason, now)

    def on_lost(self, node: str, now: float) -> list[Work]:
        """A node was silent for too long."""
        return self._away_now(node, How.LOST, "gave no sign of life", now)

    def on_tick(self, now: float) -> list[Work]:
        """Time has passed."""
        refused = self._refuse_doubtful(now)
        if self.phase is Phase.FORMING:
            return refused + self._try_form(now)
        if self.phase is Phase.RUNNING and self._grows(now):
            return refused + self._end_cycle(How.GREW, f"{len(self._waiting)} more nodes are here", now)
        return refused

    def next_deadline(self) -> float | None:
        """When `on_tick` is due."""
        ends = [since + self._rules.doubt_s for _, since in self._doubtful.values()]
        if self.phase is Phase.FORMING:
            ends.append(max(self._since + self._rules.join_s, self._not_before))
            if self._enough_since is not None:
                ends.append(max(self._enough_since + self._last_call_s(), self._not_before))
        elif self.phase is Phase.RUNNING and self._enough_since is not None:
            ends.append(self._enough_since + self._rules.last_call_s)
        return min(ends, default=None)

    def _arrived(self, came: Arrive, now: float) -> list[Work]:
        if came.node in self._ignored:
            return []
        if self.phase is Phase.OVER:
            self._told.add(came.node)
            return [Reply(came.node, came.seq, self._over)]
        known = self._members.get(came.node), self._waiting.get(came.node)
        if any(earlier is not None and came.seq <= earlier.seq for earlier in known):
            return []  # sent twice, since the answer of the store was lost
        if came.rank >= self._rules.size.maximum:
            reason = f"node rank {came.rank} is not below the number of nodes, {self._rules.size.maximum}"
            return [Reply(came.node, came.seq, Over(int(ExitCode.BAD_CONFIG), reason))]
        if self._holder_of(came) is not None:
            self._doubtful[came.node] = (came, now)
            return self._refuse_doubtful(now)
        ending: list[Work] = []
        if self.phase is Phase.RUNNING and came.node in self._members and came.node not in self._away:
            ending = self._end_cycle(How.FAILED, f"node {came.name} started again", now)
        self._waiting[came.node] = came
        return ending + self.on_tick(now)

    def _holder_of(self, came: Arrive) -> Arrive | None:
        """A node, not known to be gone, that has the rank this one insists on."""
        if came.rank == NO_RANK:
            return None
        others = [*self._waiting.values(), *(m for node, m in self._members.items() if node not in self._away)]
        return next((node for node in others if node.rank == came.rank and node.node != came.node), None)

    def _refuse_doubtful(self, now: float) -> list[Work]:
        """Sends away those whose rank is held by a node that lives; takes those whose rank became free."""
        refused: list[Work] = []
        for came, since in list(self._doubtful.values()):
            holder = self._holder_of(came)
            if holder is None:
                self._waiting[came.node] = came
            elif holder.node == self._me or now >= since + self._rules.doubt_s:
                reason = f"node rank {came.rank} is taken by node {holder.name}; give each node its own --node-rank"
                refused.append(Reply(came.node, came.seq, Over(int(ExitCode.BAD_CONFIG), reason)))
            else:
                continue
            del self._doubtful[came.node]
        return refused

    def _part_ended(self, ended: Ended, now: float) -> list[Work]:
        if ended.cycle != self._cycle or ended.node not in self._members or ended.node in self._away:
            return []
        if ended.how == How.FAILED:
            self._first_fault.append(ended.node)
        if self.phase is not Phase.RUNNING:
            return []
        match ended.how:
            case How.SUCCEEDED:
                self._done.add(ended.node)
                return self._succeed_if_all()
            case How.STOP:
                return self._finish(How.STOP, ended.exit_code, ended.reason)
            case How.RESTART:
                return self._end_cycle(How.RESTART, ended.reason, now)
        reason = f"node {self._members[ended.node].name}: {ended.reason}"
        return self._lose_member(ended.node, How.FAILED, reason, now)

    def _away_now(self, node: str, how: How, reason: str, now: float) -> list[Work]:
        self._told.discard(node)
        self._waiting.pop(node, None)
        self._doubtful.pop(node, None)
        if self._rules.hosts and node == self._me and self.phase is not Phase.OVER:
            return self._finish(
                How.LEFT, int(ExitCode.STORE_HOST_LOST), f"the node that hosts the store left: {reason}"
            )
        if node not in self._members or self._away.get(node) in (How.LEFT, How.LOST):
            return self.on_tick(now)
        if self.phase is not Phase.RUNNING or node in self._done:
            self._away[node] = how
            return self.on_tick(now)
        verb = "left" if how is How.LEFT else "is lost"
        return self._lose_member(node, how, f"node {self._members[node].name} {verb}: {reason}", now)

    def _lose_member(self, node: str, how: How, reason: str, now: float) -> list[Work]:
        self._away[node] = how
        healthy = len(self._members) - len(self._away)
        if self._rules.keep_healthy and healthy >= self._rules.size.minimum:
            return self._succeed_if_all()
        return self._end_cycle(how, reason, now)

    def _succeed_if_all(self) -> list[Work]:
        if self._done and self._members.keys() <= self._done | self._away.keys():
            return self._finish(How.SUCCEEDED, int(ExitCode.OK), "all ranks succeeded")
        return []

    # Endings.

    def _end_cycle(self, how: How, reason: str, now: float) -> list[Work]:
        self.phase = Phase.FORMING
        self._since = self._not_before = now
        self._enough_since, self._judged, self._why = None, None, reason
        self._away = {node: why for node, why in self._away.items() if why in (How.LEFT, How.LOST)}
        self._done = set()
        return [CycleEnd(self._cycle, how.value, reason), *self._try_form(now)]

    def _finish(self, how: How, exit_code: int, reason: str) -> list[Work]:
        ended = CycleEnd(self._cycle, how.value, reason, exit_code)
        self._told |= {node for node in self._members if self._away.get(node) not in (How.LEFT, How.LOST)}
        return [ended, *self._give_up(Over(exit_code, reason))]

    def _give_up(self, over: Over) -> list[Work]:
        self.phase = Phase.OVER
        self._over = over
        self._waiting |= {node: came for node, (came, _) in self._doubtful.items()}
        self._told |= set(self._waiting)
        formed = self.formed()
        waiting, self._waiting, self._doubtful = self._waiting, {}, {}
        return [formed, *(Reply(node, came.seq, self._with_owed(node, over)) for node, came in waiting.items())]

    # Forming.

    def _last_call_s(self) -> float:
        return 0.0 if self._living_members() else self._rules.last_call_s

    def _living_members(self) -> list[str]:
        return [node for node in self._members if node not in self._away]

    def _grows(self, now: float) -> bool:
        """Whether those who wait are enough reason to end a healthy cycle now. Sets the moment they became so.

        A cycle in which a node is done with its work does not begin again for that.
        """
        size, after = self._rules.size, 0
        if self._waiting and size.may_grow and not self._done:
            there = {node: self._members[node] for node in self._living_members()} | self._waiting
            after = how_many(there.values(), len(self._members), size)
        if after <= len(self._members):
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        return after == size.maximum or now >= self._enough_since + self._rules.last_call_s

    def _try_form(self, now: float) -> list[Work]:
        overdue = now >= self._since + self._rules.join_s
        if not overdue and any(node not in self._waiting and node not in self._away for node in self._members):
            return []
        if self._judged is None and (work := self._judge_now(now)):
            return work
        count = how_many(self._waiting.values(), len(self._members), self._rules.size)
        if count == 0:
            self._enough_since = None
            return self._give_up(self._too_few()) if overdue else []
        if self._enough_since is None:
            self._enough_since = now
        at_once = count == self._rules.size.maximum or now >= self._enough_since + self._last_call_s()
        if (not at_once and not overdue) or now < self._not_before:
            return []
        return self._form(self._chosen(count))

    def _chosen(self, count: int) -> list[Arrive]:
        """The members of the next cycle; without the faulty node where it is to be replaced and can be."""
        came, former, size = list(self._waiting.values()), list(self._members), self._rules.size
        if self._judged is not None and self._judged[0].moves:
            others = [node for node in came if node.node != self._judged[1]]
            if how_many(others, len(former), size) == count:
                return choose(others, former, size)
        return choose(came, former, size)

    def _judge_now(self, now: float) -> list[Work]:
        """Has the fault judged that ended the cycle; work when the job is over by it."""
        faults = self._faults()
        culprit = cause.culprit(faults, gone=any(node in self._away for node in self._members))
        if culprit is None:
            self._judged = (Judgement(self._why, None, {}, self._history), "")
            return []
        fault = cause.as_one(faults[culprit], faults.values())
        elsewhere = len(self._waiting) > len(self._members)
        try:
            judgement = self._judge(Case(fault, self._history, now - self._history_at, elsewhere), now)
        except ProtocolError as error:
            judgement = Judgement(str(error), int(ExitCode.LAUNCHER_ERROR), {}, self._history)
        self._history_at = now
        self._judged = (judgement, culprit)
        self._history, self._why = judgement.history, judgement.reason
        self._not_before = now + judgement.wait_s
        if judgement.exit_code is None:
            return []
        return self._give_up(Over(judgement.exit_code, judgement.reason, judgement.decision, culprit))

    def _faults(self) -> dict[str, dict[str, Any]]:
        """Those of the last cycle, by node, the first to tell of one first."""
        told = [node for node in self._first_fault if node in self._waiting]
        brought = [node for node, came in self._waiting.items() if came.fault and came.cycle == self._cycle]
        return {node: self._waiting[node].fault for node in told + brought}

    def _too_few(self) -> Over:
        size = self._rules.size
        text = f"{len(self._waiting)} of at least {size.minimum} nodes came within {self._rules.join_s:g} s"
        first = self._cycle == NO_CYCLE
        return Over(int(ExitCode.RENDEZVOUS_FAILED if first else ExitCode.BELOW_MINIMUM), text)

    def _form(self, members: list[Arrive]) -> list[Work]:
        self.phase = Phase.RUNNING
        self._cycle += 1
        self._members = {came.node: replace(came, fault={}) for came in members}
        for came in members:
            del self._waiting[came.node]
        self._away, self._first_fault, self._enough_since = {}, [], None
        if self._judged is not None and self._judged[1] in self._waiting:
            self._owed[self._judged[1]] = self._judged[0].decision
        return [self.formed(), *self._places()]

    def _with_owed(self, node: str, answer: _A) -> _A:
        """The answer, with the decision about its fault for a node that had to wait since then."""
        decision = self._owed.pop(node, None)
        return answer if decision is None else replace(answer, decision=decision, fault_of=node)

    def _places(self) -> list[Work]:
        judgement, culprit = self._judged or (Judgement(self._why, None, {}, {}), "")
        deputies = [node for node in self._members if node != self._me][: self._rules.deputies]
        place = Place(self._cycle, 0, len(self._members), judgement.reason, False, judgement.decision, culprit)
        return [
            Reply(node, came.seq, self._with_owed(node, replace(place, rank=rank, deputy=node in deputies)))
            for rank, (node, came) in enumerate(self._members.items())
        ]
