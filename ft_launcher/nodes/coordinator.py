"""Forms the cycles of a job of several nodes: messages, losses and time in, answers out. Pure.

Knows no store, no thread and no clock, so a fault that takes weeks to occur is a line of a test.

    FORMING   who came is kept until a cycle can form: at once when all of the last cycle that live are back, or the
              maximum is there; else `last_call_s` after the minimum was reached. Too few for `join_s`, or too few
              once a member was preempted: OVER.
    RUNNING   ended by the first failure, loss, preemption or departure of a member, by a request, or to grow: FORMING.
              All members succeeded, or one asked to stop: OVER.
    OVER      whoever comes is told so, by whoever takes over too.

An ended cycle's messages change nothing later: each carries its cycle's number.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from enum import Enum, auto
from typing import Any

from ft_launcher.nodes.doubts import Doubts, holder_of
from ft_launcher.nodes.membership import choose, how_many
from ft_launcher.nodes.messages import (
    NO_CYCLE,
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
from ft_launcher.nodes.moves import can_exchange, choose_moved
from ft_launcher.nodes.terms import Judge, Reply, Rules, Work
from ft_launcher.nodes.verdict import Verdict
from rank_monitor.contract.exit_codes import ExitCode

_NOT_BACK = (How.LEFT, How.LOST, How.PREEMPTED)


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
        self._me, self._rules = me, rules
        self._verdict = Verdict(judge, rules.in_vain, now, former)
        self._term = 1
        self._cycle = NO_CYCLE
        self._members: dict[str, Arrive] = {}
        self._waiting: dict[str, Arrive] = {}
        self._doubts = Doubts(me, rules.doubt_s)
        self._away: dict[str, How] = {}
        self._done: set[str] = set()
        self._ignored: set[str] = set()
        self._told: set[str] = set()
        self._first_fault: list[str] = []
        self._why = "the first nodes came"
        self._preemption = ""
        self._since = now
        self._enough_since: float | None = None
        self._not_before = now
        self._over = Over(int(ExitCode.OK), "")
        if former is not None:
            self._take_over(former)

    def _take_over(self, former: Formed) -> None:
        self._term = former.term + 1
        self._cycle, self.read = former.cycle, former.read
        self._why = former.reason or self._why
        arrivals = arrivals_of(former)
        self._members = {node: arrivals.pop(node) for node in former.members}
        self._waiting = arrivals
        self._ignored = {*former.deposed, former.coordinator} - {self._me}
        if self._members:
            self.phase = Phase.RUNNING
        if (over := over_of(former)) is not None:
            self.phase, self._over = Phase.OVER, over

    @property
    def nodes(self) -> set[str]:
        """Everybody who is taking part or waiting, or has still to leave, as far as they are not known to be gone."""
        return {node for node in self._members if node not in self._away} | set(self._waiting) | self.to_leave

    @property
    def size(self) -> int:
        """How many nodes the last cycle has, or had."""
        return len(self._members)

    @property
    def to_leave(self) -> set[str]:
        """Once the job is over: the other nodes that were told and have not left yet."""
        return self._told - {self._me} if self.phase is Phase.OVER else set()

    def formed(self) -> Formed:
        """What another coordinator needs to take over."""
        arrivals = {node: asdict(came) for node, came in (self._members | self._waiting).items()}
        members = list(self._members)
        over = asdict(self._over) if self.phase is Phase.OVER else {}
        place, decided = (self._cycle, self._me, self._term, self.read), self._verdict.record()
        return Formed(*place, members, self._why, arrivals, over=over, deposed=sorted(self._ignored), **decided)

    def retell(self) -> list[Work]:
        """After a take-over: what the coordinator before may have agreed on and not told; harmless to tell again."""
        if self.phase is Phase.RUNNING:
            return self._places()
        if self.phase is Phase.FORMING:
            return []
        how = How.SUCCEEDED if self._over.exit_code == ExitCode.OK else How.STOP
        everybody, self._waiting = self._members | self._waiting, {}
        ended = CycleEnd(self._cycle, how.value, self._over.reason, self._over.exit_code)
        return [
            ended,
            *(Reply(node, came.seq, self._verdict.told(node, self._over)) for node, came in everybody.items()),
        ]

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
        refused = self._settle_doubts(now)
        if self.phase is Phase.FORMING:
            return refused + self._try_form(now)
        if self.phase is Phase.RUNNING and self._grows(now):
            return refused + self._end_cycle(How.GREW, f"{len(self._waiting)} more nodes are here", now)
        return refused

    def next_deadline(self) -> float | None:
        """When `on_tick` is due."""
        ends = self._doubts.deadlines()
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
        if holder_of(came, self._present()) is not None:
            self._doubts.keep(came, now)
            return self._settle_doubts(now)
        ending: list[Work] = []
        if self.phase is Phase.RUNNING and came.node in self._members and came.node not in self._away:
            ending = self._end_cycle(How.FAILED, f"node {came.name} started again", now)
        self._waiting[came.node] = came
        return ending + self.on_tick(now)

    def _present(self) -> list[Arrive]:
        """Members and waiting nodes that are not known to be gone."""
        return [*self._waiting.values(), *(m for node, m in self._members.items() if node not in self._away)]

    def _settle_doubts(self, now: float) -> list[Work]:
        let_in, refused = self._doubts.settle(self._present(), now)
        self._waiting |= {came.node: came for came in let_in}
        return list(refused)

    def _part_ended(self, ended: Ended, now: float) -> list[Work]:
        if ended.cycle != self._cycle or ended.node not in self._members or ended.node in self._away:
            return []
        if ended.how in (How.FAILED, How.AGREED):
            self._first_fault.append(ended.node)
        if ended.how == How.PREEMPTED:
            return self._preempted(ended, now)
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
        return self._lose_member(ended.node, How(ended.how), reason, now)

    def _preempted(self, ended: Ended, now: float) -> list[Work]:
        """A node was told to end. The others go on without it if they are enough: nobody says that it will be back."""
        self._preemption = f"node {self._members[ended.node].name} is preempted: {ended.reason}"
        if self.phase is Phase.RUNNING and self._rules.hosts and ended.node == self._me:
            return self._finish(How.PREEMPTED, int(ExitCode.PREEMPTED), self._preemption)
        if self.phase is Phase.RUNNING:
            return self._lose_member(ended.node, How.PREEMPTED, self._preemption, now)
        self._away[ended.node] = How.PREEMPTED
        return self.on_tick(now)

    def _away_now(self, node: str, how: How, reason: str, now: float) -> list[Work]:
        self._told.discard(node)
        self._waiting.pop(node, None)
        self._doubts.drop(node)
        if self._rules.hosts and node == self._me and self.phase is not Phase.OVER:
            return self._finish(
                How.LEFT, int(ExitCode.STORE_HOST_LOST), f"the node that hosts the store left: {reason}"
            )
        if node not in self._members or self._away.get(node) in _NOT_BACK:
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
        self._enough_since, self._why = None, reason
        self._verdict.forget()
        self._away = {node: why for node, why in self._away.items() if why in _NOT_BACK}
        self._done = set()
        return [CycleEnd(self._cycle, how.value, reason), *self._try_form(now)]

    def _finish(self, how: How, exit_code: int, reason: str) -> list[Work]:
        ended = CycleEnd(self._cycle, how.value, reason, exit_code)
        self._told |= {node for node in self._members if self._away.get(node) not in _NOT_BACK}
        return [ended, *self._give_up(Over(exit_code, reason))]

    def _give_up(self, over: Over) -> list[Work]:
        self.phase = Phase.OVER
        self._over = over
        self._waiting |= self._doubts.take_all()
        self._told |= set(self._waiting)
        formed = self.formed()
        waiting, self._waiting = self._waiting, {}
        return [formed, *(Reply(node, came.seq, self._verdict.told(node, over)) for node, came in waiting.items())]

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
        if self._verdict.judgement is None and (work := self._judge_now(now)):
            return work
        count = how_many(self._waiting.values(), len(self._members), self._rules.size)
        if count == 0:
            self._enough_since = None
            return self._give_up(self._too_few()) if overdue or self._preemption else []
        if self._enough_since is None:
            self._enough_since = now
        at_once = count == self._rules.size.maximum or now >= self._enough_since + self._last_call_s()
        if (not at_once and not overdue) or now < self._not_before:
            return []
        return self._form(self._chosen())

    def _chosen(self) -> list[Arrive]:
        """The members of the next cycle; where ranks are to move, on other hardware."""
        came, former, size = list(self._waiting.values()), list(self._members), self._rules.size
        if self._verdict.moves:
            return choose_moved(came, former, size, self._verdict.culprit, self._verdict.may_exchange)
        return choose(came, former, size)

    def _judge_now(self, now: float) -> list[Work]:
        """Has the fault judged that ended the cycle; work when the job is over by it."""
        gone = any(node in self._away for node in self._members)
        places = len(self._waiting) > len(self._members), can_exchange(self._waiting.values(), self._members)
        judged = self._verdict.find(self._faults(), bool(self._first_fault), gone, places, self._why, now)
        self._why, self._not_before = judged.reason, now + judged.wait_s
        if judged.exit_code is None:
            return []
        return self._give_up(Over(judged.exit_code, judged.reason, judged.decision, self._verdict.culprit))

    def _faults(self) -> dict[str, dict[str, Any]]:
        """Those of the last cycle, by node, the first to tell of one first."""
        told = [node for node in self._first_fault if node in self._waiting]
        brought = [node for node, came in self._waiting.items() if came.fault and came.cycle == self._cycle]
        return {node: self._waiting[node].fault for node in told + brought}

    def _too_few(self) -> Over:
        size = self._rules.size
        if self._preemption:
            return Over(int(ExitCode.PREEMPTED), f"{self._preemption}, and the others are too few without it")
        text = f"{len(self._waiting)} of at least {size.minimum} nodes came within {self._rules.join_s:g} s"
        if self._rules.hint:
            text = f"{text}; {self._rules.hint}"
        first = self._cycle == NO_CYCLE
        return Over(int(ExitCode.RENDEZVOUS_FAILED if first else ExitCode.BELOW_MINIMUM), text)

    def _form(self, members: list[Arrive]) -> list[Work]:
        self.phase = Phase.RUNNING
        self._cycle += 1
        self._members = {came.node: replace(came, fault={}) for came in members}
        for came in members:
            del self._waiting[came.node]
        self._away, self._first_fault, self._enough_since, self._preemption = {}, [], None, ""
        self._verdict.owe(self._waiting)
        return [self.formed(), *self._places()]

    def _places(self) -> list[Work]:
        deputies = [node for node in self._members if node != self._me][: self._rules.deputies]
        decided = self._verdict
        place = Place(self._cycle, 0, len(self._members), self._why, False, decided.decision, decided.culprit)
        return [
            Reply(node, came.seq, decided.told(node, replace(place, rank=rank, deputy=node in deputies)))
            for rank, (node, came) in enumerate(self._members.items())
        ]
