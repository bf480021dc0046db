"""Any schedule of simulated nodes against the coordinator: what always holds.

The nodes do what agents do: they come, have a place, fail, succeed, die, sleep and wake, leave, send things twice, and
come back after the end of a cycle was told. Now and then another takes over from what was agreed on last, and reads the
inbox from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ft_launcher.decide.policy.restart_policy import REQUESTS
from ft_launcher.job.coordinator.coordinator import Coordinator, Phase
from ft_launcher.job.coordinator.formation import Rules, Size
from ft_launcher.job.coordinator.node_messages import (
    NO_CYCLE,
    Answer,
    CycleEnd,
    Ended,
    EndReason,
    Formed,
    Left,
    RankAssigned,
    Reply,
    ToCoordinator,
    Work,
)
from tests.ft_launcher.job.nodes_of_a_test import failed, judge, node, request

NODES = 7
JOIN_S, LAST_CALL_S, DOUBT_S = 600.0, 30.0, 17.0


@dataclass
class Simulated:
    """A node as its agent is: where it is, and what it was told."""

    name: str
    state: str = "out"
    seq: int = 0
    cycle: int = NO_CYCLE


@dataclass
class World:
    """The coordinator with all nodes, the inbox, and what was told so far."""

    rules: Rules
    now: float = 0.0
    inbox: list[ToCoordinator] = field(default_factory=list)
    formed: Formed | None = None
    cycle: int = NO_CYCLE
    ended: bool = True
    count: int = NODES

    def __post_init__(self) -> None:
        self.nodes = [Simulated(f"n{index}") for index in range(self.count)]
        self.machine = Coordinator("n0", self.rules, judge, 0.0)
        self.terms = 1

        self.dead: list[str] = []
        self.done_in = NO_CYCLE
        self.answers: dict[tuple[str, int], Answer] = {}

    def find(self, name: str) -> Simulated | None:
        return next((one for one in self.nodes if one.name == name), None)

    def post(self, message: ToCoordinator) -> list[Work]:
        self.inbox.append(message)
        work = self.machine.on(message, self.now)
        self.heed(work)
        return work

    def heed(self, work: list[Work], again: bool = False) -> None:
        """Checks what is told, and tells the nodes."""
        placed: list[tuple[int, str]] = []
        for one in work:
            match one:
                case Formed() if one.over or one.cycle == self.cycle:
                    self.formed = one
                case Formed():
                    assert self.ended, "at most one cycle runs"
                    assert one.cycle == self.cycle + 1
                    self.formed, self.cycle, self.ended = one, one.cycle, False
                case CycleEnd() if again and one.cycle == self.cycle - 1:
                    pass  # for whoever did not hear of it from the coordinator before
                case CycleEnd():
                    assert one.cycle == self.cycle
                    self.ended = True
                    for member in self.nodes:
                        if member.cycle == one.cycle and member.state in ("in", "done"):
                            member.state = "ended"
                case Reply(name, seq, answer):
                    self.say_the_same(name, seq, answer)
                    told = self.find(name)
                    assert told is None or told.seq >= seq
                    if told is None:
                        assert again, "a process that is gone gets no answer"
                    elif told.seq == seq and told.state == "waiting":
                        told.state = "in" if isinstance(answer, RankAssigned) else "over"
                        told.cycle = answer.cycle if isinstance(answer, RankAssigned) else told.cycle
                    else:
                        assert again or told.state in ("dead", "asleep"), "an answer only for one that waits"
                    if isinstance(answer, RankAssigned):
                        assert answer.cycle == self.cycle
                        placed.append((answer.rank, name))
        if placed:
            assert [rank for rank, _ in placed] == list(range(len(placed))), "ranks are consecutive"
            assert len({name for _, name in placed}) == len(placed), "never a node twice"
            assert self.rules.size.minimum <= len(placed) <= self.rules.size.maximum

    def say_the_same(self, name: str, seq: int, answer: Answer) -> None:
        """Whoever tells a node its place or its end again says what was said before, with the decision."""
        before = self.answers.get((name, seq))
        if isinstance(before, RankAssigned) and isinstance(answer, RankAssigned):
            assert replace(before, deputy=answer.deputy) == answer, "another deputy, but nothing else"
        elif type(before) is type(answer):
            assert before == answer
        self.answers[name, seq] = answer

    # What can happen.

    def come(self, one: Simulated) -> None:
        if one.state in ("out", "ended", "dead"):
            if one.state == "dead":  # what comes in its place has another name
                self.dead.append(one.name)
                one.name += "'"
                one.seq, one.cycle = 0, NO_CYCLE
            one.state, one.seq = "waiting", one.seq + 1
            report = failed() if one.cycle >= 0 and one.seq % 2 else None
            self.post(node(one.name, one.seq, one.cycle, report=report))

    def fail(self, one: Simulated) -> None:
        if one.state == "in":
            self.post(Ended(one.name, one.cycle, EndReason.AGREED if one.seq % 3 == 0 else EndReason.FAILED, "boom"))
            one.state = "ended"

    def preempt(self, one: Simulated) -> None:
        """Its process leaves, with a word or without."""
        if one.state in ("in", "ended"):
            self.post(Ended(one.name, one.cycle, EndReason.PREEMPTED, "told to end"))
            one.state = "dead"
            if one.seq % 2:
                self.post(Left(one.name, "bye"))

    def succeed(self, one: Simulated) -> None:
        if one.state == "in":
            one.state = "done"
            self.done_in = one.cycle
            self.post(Ended(one.name, one.cycle, EndReason.SUCCEEDED, ""))

    def lose(self, one: Simulated) -> None:
        if one.state in ("waiting", "in", "done", "ended"):
            one.state = "dead"
            self.heed(self.machine.on_lost(one.name, self.now))

    def sleep(self, one: Simulated) -> None:
        """It is counted as lost, wakes, finds its cycle ended, and comes back under its name."""
        if one.state == "in":
            one.state = "asleep"
            self.heed(self.machine.on_lost(one.name, self.now))
            one.state = "ended" if self.ended or one.cycle != self.cycle else "in"

    def leave(self, one: Simulated) -> None:
        if one.state != "out":
            one.state = "dead"
            self.post(Left(one.name, "bye", signal=15 * (one.seq % 2)))

    def ask(self, one: Simulated) -> None:
        """A rank of its asks for a restart, for the end of the job, or for it to leave."""
        if one.state == "in":
            one.state = "ended"
            action = ["restart", "stop_job", "restart", "exclude_this_node"][one.seq % 4]
            self.post(Ended(one.name, one.cycle, EndReason.ASKED, "please", request(action)))

    def say_late(self, one: Simulated) -> None:
        if 0 <= one.cycle < self.cycle:
            for how in EndReason:
                assert self.post(Ended(one.name, one.cycle, how, "late")) == []
            for action in REQUESTS:
                assert self.post(Ended(one.name, one.cycle, EndReason.ASKED, "late", request(action))) == []

    def say_twice(self, one: Simulated) -> None:
        if one.state == "waiting":
            assert self.post(node(one.name, one.seq, one.cycle)) == []

    def wait(self, one: Simulated) -> None:
        self.pass_time(LAST_CALL_S * (1 + self.nodes.index(one)))

    def take_over(self, one: Simulated) -> None:
        """As `CoordinatorService.take_over` does: the previous coordinator is lost, and its process with it."""
        if self.formed is None or one.state in ("dead", "out") or self.formed.coordinator == one.name:
            return
        before, self.terms = self.formed.coordinator, self.terms + 1
        self.machine = Coordinator(one.name, self.rules, judge, self.now, self.formed)
        self.formed = self.machine.formed()
        for lost in self.nodes:
            if lost.name == before:
                lost.state = "dead"
        self.heed(self.machine.resend(), again=True)
        for message in self.inbox[self.machine.read :]:
            self.heed(self.machine.on(message, self.now), again=True)
        self.heed(self.machine.on_lost(before, self.now), again=True)
        for name in [*self.dead, *(one.name for one in self.nodes if one.state == "dead")]:
            self.heed(self.machine.on_lost(name, self.now), again=True)

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while (due := self.machine.next_deadline()) is not None and due <= until:
            assert due > self.now, "a deadline in the past would be asked for again and again"
            self.now = due
            self.heed(self.machine.on_tick(self.now))
        self.now = until
        self.heed(self.machine.on_tick(self.now))


HAPPENINGS = [
    *[World.come] * 6,
    *[World.fail] * 2,
    World.succeed,
    World.succeed,
    World.lose,
    World.preempt,
    World.sleep,
    World.leave,
    World.ask,
    World.say_late,
    World.say_twice,
    World.wait,
    World.take_over,
]


OF_ONE = [World.come, World.come, World.fail, World.succeed, World.ask, World.say_late, World.say_twice, World.wait]
"""What can happen to the only node of a job: the coordinator is in its process, and never loses it."""


def some_size(chance: Random) -> Size:
    least, up, down = chance.randint(1, 3), chance.random() < 0.7, chance.random() < 0.7
    return Size(least, least + chance.randint(0, 3), chance.randint(0, 2), None, up, down)


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 10**9))
def test_what_always_holds(seed: int) -> None:
    chance = Random(seed)
    size, keep_healthy = some_size(chance), chance.random() < 0.3
    world = World(Rules(size, LAST_CALL_S, JOIN_S, keep_healthy, rank_claim_s=DOUBT_S))
    for _ in range(chance.randint(5, 120)):
        chance.choice(HAPPENINGS)(world, chance.choice(world.nodes))
    for one in world.nodes:
        world.come(one)
    world.pass_time(JOIN_S + LAST_CALL_S)
    for one in world.nodes:  # those whose cycle ended to let the others in
        world.come(one)
    world.pass_time(JOIN_S + LAST_CALL_S)
    waiting = [one for one in world.nodes if one.state == "waiting"]
    match world.machine.phase:
        case Phase.OVER:
            assert waiting == [], "all have their answer"
            for one in world.nodes:
                world.leave(one)
            for name in [*world.dead, *(one.name for one in world.nodes)]:
                world.heed(world.machine.on_lost(name, world.now))
            assert world.machine.to_leave == set(), "nobody is waited for in vain"
        case Phase.RUNNING:
            assert not world.ended
            members = [one for one in world.nodes if one.state in ("in", "done") and one.cycle == world.cycle]
            full = len(members) >= size.active(len(members) + len(waiting), len(members))
            assert not waiting or full or keep_healthy or not size.may_grow or world.done_in == world.cycle
        case Phase.FORMING:
            raise AssertionError("there is an answer once the join timeout is over")


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9))
def test_what_always_holds_for_one_node(seed: int) -> None:
    """The node is answered at once, or by time alone: no other node, and no store, has a part in it."""
    chance = Random(seed)
    world = World(Rules(Size(1, 1), keep_healthy=chance.random() < 0.3, hosts=True), count=1)
    (one,) = world.nodes
    for _ in range(chance.randint(5, 60)):
        chance.choice(OF_ONE)(world, one)
        if one.state == "waiting":
            due = world.machine.next_deadline()
            assert due is not None
            world.pass_time(due - world.now)
        assert one.state != "waiting"
    world.come(one)
    world.pass_time(JOIN_S)
    assert one.state in ("in", "over") or one.state == "done"
    assert (one.state == "over") == (world.machine.phase is Phase.OVER) or one.state == "done"
