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

from ft_launcher.nodes.doubts import Doubts, holder_of
from ft_launcher.nodes.formation import Formation
from ft_launcher.nodes.messages import Arrive, CycleEnd, Ended, Formed, Gone, How, Over, Place, ToCoordinator, over_of
from ft_launcher.nodes.roster import Roster
from ft_launcher.nodes.terms import Judge, Reply, Rules, Work
from ft_launcher.nodes.verdict import Verdict
from rank_monitor.contract.exit_codes import ExitCode


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
        self._roster = Roster(former)
        self._verdict = Verdict(judge, rules.in_vain, now, former)
        self._formation = Formation(rules, self._roster, self._verdict, now, former)
        self._doubts = Doubts(me, rules.doubt_s)
        self._term = 1
        self._preempted_by = 0
        self._ignored: set[str] = set()
        self._told: set[str] = set()
        self._over = Over(int(ExitCode.OK), "")
        if former is not None:
            self._take_over(former)

    def _take_over(self, former: Formed) -> None:
        self._term, self.read = former.term + 1, former.read
        self._ignored = {*former.deposed, former.coordinator} - {self._me}
        if former.members:
            self.phase = Phase.RUNNING
        if (over := over_of(former)) is not None:
            self.phase, self._over = Phase.OVER, over

    @property
    def nodes(self) -> set[str]:
        """Everybody who is taking part or waiting, or has still to leave, as far as they are not known to be gone."""
        return {came.node for came in self._roster.present()} | self.to_leave

    @property
    def size(self) -> int:
        """How many nodes the last cycle has, or had."""
        return len(self._roster.members)

    @property
    def to_leave(self) -> set[str]:
        """Once the job is over: the other nodes that were told and have not left yet."""
        return self._told - {self._me} if self.phase is Phase.OVER else set()

    def formed(self) -> Formed:
        """What another coordinator needs to take over."""
        arrivals = {node: asdict(came) for node, came in (self._roster.members | self._roster.waiting).items()}
        cycle = (self._roster.cycle, self._me, self._term, self.read, list(self._roster.members), self._formation.why)
        over = asdict(self._over) if self.phase is Phase.OVER else {}
        return Formed(*cycle, arrivals, over=over, deposed=sorted(self._ignored), **self._verdict.record())

    def retell(self) -> list[Work]:
        """After a take-over: what the coordinator before may have agreed on and not told; harmless to tell again."""
        if self.phase is Phase.RUNNING:
            before = self._roster.cycle - 1  # who still waits for the end of that one waits for nothing else
            ended: list[Work] = [CycleEnd(before, How.RESTART.value, self._formation.why)] if before >= 0 else []
            return [*ended, *self._places()]
        if self.phase is Phase.FORMING:
            return []
        how = How.SUCCEEDED if self._over.exit_code == ExitCode.OK else How.STOP
        everybody = self._roster.members | self._roster.waiting
        self._roster.waiting = {}
        return [self._cycle_end(how, self._over.reason, self._over.exit_code), *self._tell(everybody, self._over)]

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
        if self.phase is Phase.RUNNING and self._formation.grows(now):
            return refused + self._end_cycle(How.GREW, f"{len(self._roster.waiting)} more nodes are here", now)
        return refused

    def next_deadline(self) -> float | None:
        """When `on_tick` is due."""
        ends = self._doubts.deadlines()
        if self.phase is not Phase.OVER:
            ends += self._formation.deadlines(self.phase is Phase.FORMING)
        return min(ends, default=None)

    def _arrived(self, came: Arrive, now: float) -> list[Work]:
        if came.node in self._ignored:
            return []
        if self.phase is Phase.OVER:
            self._told.add(came.node)
            return [Reply(came.node, came.seq, self._over)]
        if self._roster.has(came):
            return []
        if came.rank >= self._rules.size.maximum:
            reason = f"node rank {came.rank} is not below the number of nodes, {self._rules.size.maximum}"
            return [Reply(came.node, came.seq, Over(int(ExitCode.BAD_CONFIG), reason))]
        if holder_of(came, self._roster.present()) is not None:
            self._doubts.keep(came, now)
            return self._settle_doubts(now)
        ending: list[Work] = []
        if self.phase is Phase.RUNNING and self._roster.lives(came.node):
            ending = self._end_cycle(How.FAILED, f"node {came.name} started again", now)
        self._roster.waiting[came.node] = came
        return ending + self.on_tick(now)

    def _settle_doubts(self, now: float) -> list[Work]:
        let_in, refused = self._doubts.settle(self._roster.present(), now)
        self._roster.waiting |= {came.node: came for came in let_in}
        return list(refused)

    def _part_ended(self, ended: Ended, now: float) -> list[Work]:
        if ended.cycle != self._roster.cycle or not self._roster.lives(ended.node):
            return []
        if ended.how in (How.FAILED, How.HUNG, How.AGREED):
            self._roster.failed.append(ended.node)
        if ended.how == How.PREEMPTED:
            return self._preempted(ended, now)
        if self.phase is not Phase.RUNNING:
            return []
        match ended.how:
            case How.SUCCEEDED:
                self._roster.done.add(ended.node)
                return self._succeed_if_all()
            case How.STOP:
                return self._finish(How.STOP, ended.exit_code, ended.reason)
            case How.RESTART:
                return self._end_cycle(How.RESTART, ended.reason, now)
        reason = f"node {self._roster.members[ended.node].name}: {ended.reason}"
        return self._lose_member(ended.node, How(ended.how), reason, now)

    def _preempted(self, ended: Ended, now: float) -> list[Work]:
        """A node was told to end. The others go on without it if they are enough: nobody says that it will be back."""
        reason = f"node {self._roster.members[ended.node].name} is preempted: {ended.reason}"
        self._formation.preempted = reason
        self._preempted_by = ended.signal
        if self.phase is Phase.RUNNING and self._rules.hosts and ended.node == self._me:
            return self._finish(How.PREEMPTED, int(ExitCode.PREEMPTED), reason)
        if self.phase is Phase.RUNNING:
            return self._lose_member(ended.node, How.PREEMPTED, reason, now)
        self._roster.away[ended.node] = How.PREEMPTED
        return self.on_tick(now)

    def _away_now(self, node: str, how: How, reason: str, now: float) -> list[Work]:
        roster = self._roster
        self._told.discard(node)
        roster.waiting.pop(node, None)
        self._doubts.drop(node)
        if self._rules.hosts and node == self._me and self.phase is not Phase.OVER:
            reason = f"the node that hosts the store left: {reason}"
            return self._finish(How.LEFT, int(ExitCode.STORE_HOST_LOST), reason)
        if node not in roster.not_gone:
            return self.on_tick(now)
        if self.phase is not Phase.RUNNING or node in roster.done:
            roster.away[node] = how
            return self.on_tick(now)
        verb = "left" if how is How.LEFT else "is lost"
        return self._lose_member(node, how, f"node {roster.members[node].name} {verb}: {reason}", now)

    def _lose_member(self, node: str, how: How, reason: str, now: float) -> list[Work]:
        self._roster.away[node] = how
        if self._rules.keep_healthy and len(self._roster.living) >= self._rules.size.minimum:
            return self._succeed_if_all()
        return self._end_cycle(how, reason, now)

    def _succeed_if_all(self) -> list[Work]:
        if self._roster.succeeded:
            return self._finish(How.SUCCEEDED, int(ExitCode.OK), "all ranks succeeded")
        return []

    # Endings.

    def _end_cycle(self, how: How, reason: str, now: float) -> list[Work]:
        self.phase = Phase.FORMING
        self._roster.end()
        self._formation.begin(reason, now)
        return [self._cycle_end(how, reason), *self._try_form(now)]

    def _cycle_end(self, how: How, reason: str, exit_code: int | None = None) -> CycleEnd:
        number = self._preempted_by if how is How.PREEMPTED else 0
        return CycleEnd(self._roster.cycle, how.value, reason, exit_code, number)

    def _finish(self, how: How, exit_code: int, reason: str) -> list[Work]:
        self._told |= self._roster.not_gone
        return [self._cycle_end(how, reason, exit_code), *self._give_up(Over(exit_code, reason))]

    def _give_up(self, over: Over) -> list[Work]:
        self.phase, self._over = Phase.OVER, over
        self._roster.waiting |= self._doubts.take_all()
        formed, waiting, self._roster.waiting = self.formed(), self._roster.waiting, {}
        self._told |= waiting.keys()
        return [formed, *self._tell(waiting, over)]

    def _tell(self, nodes: dict[str, Arrive], over: Over) -> list[Work]:
        return [Reply(node, came.seq, self._verdict.told(node, over)) for node, came in nodes.items()]

    # Beginnings.

    def _try_form(self, now: float) -> list[Work]:
        match self._formation.outcome(now):
            case None:
                return []
            case Over() as over:
                return self._give_up(over)
            case members:
                self.phase = Phase.RUNNING
                self._roster.form(members)
                self._verdict.owe(self._roster.waiting)
                return [self.formed(), *self._places()]

    def _places(self) -> list[Work]:
        deputies = [node for node in self._roster.members if node != self._me][: self._rules.deputies]
        cycle, count, why, decided = self._roster.cycle, self.size, self._formation.why, self._verdict
        place = Place(cycle, 0, count, why, False, decided.decision, decided.culprit)
        places = [replace(place, rank=rank, deputy=node in deputies) for rank, node in enumerate(self._roster.members)]
        active, standby = (
            [came.name for came in nodes.values()] for nodes in (self._roster.members, self._roster.waiting)
        )
        places[0] = replace(places[0], active=active, standby=standby)
        return [
            Reply(node, came.seq, decided.told(node, answer))
            for (node, came), answer in zip(self._roster.members.items(), places, strict=True)
        ]
