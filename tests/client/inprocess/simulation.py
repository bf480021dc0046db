"""Many ranks of a call in one process, one store operation at a time, in an order that a script decides.

Everything that is decided is real: the restart machine and what is written to the store. Simulated are the store, the
time, what the function does, and death: a rank may be killed before any of its operations. The script is a list of
numbers, so that a failing one can be made shorter and printed.
"""

from __future__ import annotations

import datetime
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import distributed

from ft_client.inprocess.assignment.gather import GatherAbandoned, Gathers
from ft_client.inprocess.restart.machine import ENDS, RestartAction, RestartEvent, step
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.restart_phase import RestartPhase
from rank_monitor.contract.rounds.barrier import Entry
from rank_monitor.contract.rounds.round import (
    DONE,
    FAULT,
    GO,
    Closed,
    Round,
    closing_of,
    current,
    depart,
    joining,
    tidy,
    withdraw,
)
from rank_monitor.contract.rounds.round_stores import serve_rounds

RECORD = '{"rank": 0, "interruption": "EXCEPTION"}'


class Killed(BaseException):
    """The process of this thread dies here."""


class Violation(AssertionError):
    """What must never happen did."""


@dataclass
class Actor:
    """One thread of the simulation: a rank's process, or whoever speaks for a dead one."""

    name: str
    member: int
    mortal: bool
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    awaits: Callable[[], bool] | None = None
    patient: bool = False
    timed_out: bool = False
    doomed: bool = False
    dead: bool = False
    ended: bool = False
    is_in: bool = True


class Stage:
    """Runs one actor at a time, from one store operation to the next, as the script says."""

    def __init__(self, script: list[int], impatient: bool = False) -> None:
        self.script, self.position, self._impatient = script, 0, impatient
        self.may_kill: Callable[[Actor], bool] = lambda actor: False
        self.actors: list[Actor] = []
        self.lines: list[str] = []
        self.here = threading.local()
        self._asleep: Actor | None = None
        self._back = threading.Semaphore(0)
        self.problem: BaseException | None = None

    def choose(self, among: int) -> int:
        """The next number of the script, below `among`; 0 when it is at its end."""
        if self.position >= len(self.script):
            return 0
        self.position += 1
        return self.script[self.position - 1] % among

    def start(self, actor: Actor, play: Callable[[], None]) -> None:
        self.actors.append(actor)

        def run() -> None:
            self.here.actor = actor
            actor.baton.acquire()
            try:
                if not actor.doomed:
                    play()
            except Killed:
                if not actor.doomed:
                    self.lines.append(f"{actor.name}: killed")
            except BaseException as error:
                self.problem = self.problem or error
            actor.ended = True
            self._back.release()

        threading.Thread(target=run, daemon=True).start()

    def pause(self, what: str, awaits: Callable[[], bool] | None = None, patient: bool = False) -> None:
        """An actor gives up the stage before its next operation, or until something is there.

        Raises:
            Killed: it dies here.
            DistStoreError: it waited, and time passed.
        """
        actor: Actor = self.here.actor
        if actor.dead:  # a process that was killed tidies nothing up
            raise Killed
        actor.awaits, actor.patient, actor.timed_out = awaits, patient, False
        self._back.release()
        actor.baton.acquire()
        actor.awaits = None
        actor.dead = actor.doomed or self.may_kill(actor)
        if actor.dead:
            raise Killed
        self.lines.append(f"{actor.name}: {what}")
        if actor.timed_out:
            raise distributed.DistStoreError("timed out")

    def run(self, most: int = 20_000) -> None:
        """Until all have ended.

        Raises:
            Violation: they wait for each other for ever.
        """
        for _ in range(most):
            alive = [actor for actor in self.actors if not actor.ended]
            if all(not actor.is_in for actor in alive):  # nobody lets them in: the launcher starts all anew
                return
            actor = self._next(self._awake(alive)) or self._next(alive)
            if actor is None:
                raise Violation("nobody can go on: " + ", ".join(actor.name for actor in alive))
            actor.baton.release()
            self._back.acquire()
            if self.problem is not None:
                raise self.problem
        raise Violation("no end")

    def _awake(self, alive: list[Actor]) -> list[Actor]:
        """All but a rank that is stopped for a while."""
        if self._impatient and self.choose(100) == 7:
            self._asleep = None if self._asleep else alive[self.choose(len(alive))]
        return [actor for actor in alive if actor is not self._asleep or not actor.mortal]

    def _next(self, alive: list[Actor]) -> Actor | None:
        """Who goes on; None: nobody can."""
        ready = [actor for actor in alive if actor.awaits is None or actor.awaits()]
        if ready:
            return ready[self.choose(len(ready))]
        for actor in alive:  # nothing happens any more: time passes
            if not actor.patient:
                actor.timed_out = True
                return actor
        return None

    def abandon(self) -> None:
        """Ends the threads that are left: of a run that failed, and of actors that outlive the others."""
        for actor in self.actors:
            actor.doomed = True
            actor.baton.release()


class SimulatedStore:
    """A store with torch's operations; each is a moment at which others may go on, or the caller may be killed."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self.values = stage, dict[str, bytes]()

    def set(self, key: str, value: str | bytes, /) -> None:
        self._stage.pause(f"set {key} {value!r}")
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str, /) -> bytes:
        self._stage.pause(f"get {key}", lambda: key in self.values)
        return self.values[key]

    def add(self, key: str, amount: int, /) -> int:
        self._stage.pause(f"add {key}")
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def append(self, key: str, value: str, /) -> None:
        self._stage.pause(f"append {key} {value.strip()}")
        self.values[key] = self.values.get(key, b"") + value.encode()

    def check(self, keys: list[str], /) -> bool:
        self._stage.pause(f"check {keys}")
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str | bytes, /) -> bytes:
        self._stage.pause(f"compare_set {key} {desired!r}")
        if expected and key not in self.values:  # as torch's stores answer for a key that is missing
            return expected.encode()
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = desired.encode() if isinstance(desired, str) else desired
        return self.values[key]

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        return [self.get(key) for key in keys]

    def delete_key(self, key: str, /) -> bool:
        self._stage.pause(f"delete {key}")
        return self.values.pop(key, None) is not None

    def wait(self, keys: list[str], timeout: datetime.timedelta = datetime.timedelta(0), /) -> None:
        patient = timeout > datetime.timedelta(days=1)
        self._stage.pause(f"comes to {keys}")
        self._stage.pause(f"wait {keys}", lambda: all(key in self.values for key in keys), patient)


@dataclass
class Plan:
    """What may go wrong: how many failures of the function, deaths and respawns.

    `active`: so many ranks are active, no more and no fewer; None: all. `impatient`: a rank may be stopped for so long
    that the others give it up. `gathers`: each rank assignment makes so many.
    """

    ranks: int
    failures: int
    deaths: int
    respawns: int
    active: int | None = None
    impatient: bool = False
    gathers: int = 0


class AssignmentStore:
    """The keys of one rank assignment as one rank sees them; its watcher abandons the gathers when there is a fault."""

    def __init__(self, rank: SimulatedRank) -> None:
        self._rank, self._prefix = rank, f"{rank.number}/assign/"
        self._fault = Round(rank.store, rank.number).started
        self.gathers = Gathers(self)

    def _key(self, key: str) -> str:
        return self._prefix + key

    def set(self, key: str, value: str | bytes, /) -> None:
        self._rank.store.set(self._key(key), value)

    def get(self, key: str, /) -> bytes:
        return self._rank.store.get(self._key(key))

    def add(self, key: str, amount: int, /) -> int:
        return self._rank.store.add(self._key(key), amount)

    def append(self, key: str, value: str, /) -> None:
        self._rank.store.append(self._key(key), value)

    def check(self, keys: list[str], /) -> bool:
        return self._rank.store.check([self._key(key) for key in keys])

    def compare_set(self, key: str, expected: str, desired: str | bytes, /) -> bytes:
        return self._rank.store.compare_set(self._key(key), expected, desired)

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        return [self.get(key) for key in keys]

    def delete_key(self, key: str, /) -> bool:
        return self._rank.store.delete_key(self._key(key))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None, /) -> None:
        (key,), values = [self._key(key) for key in keys], self._rank.store.values

        def is_free() -> bool:
            return key in values or values.get(self._fault) == FAULT.encode()

        self._rank.stage.pause(f"comes to {key}")
        self._rank.stage.pause(f"wait {key}", is_free, patient=not self._rank.call.plan.impatient)
        if key not in values:
            self.gathers.abandon(self)


class SimulatedCall:
    """One call on all ranks: who has which number when, and how it ended for each."""

    def __init__(self, plan: Plan, script: list[int]) -> None:
        self.plan, self.stage = plan, Stage(script, plan.impatient)
        self.store = SimulatedStore(self.stage)
        self.places: dict[tuple[int, int], int] = {}
        self.sizes: dict[int, int] = {}
        self.ends: dict[str, tuple[RestartPhase, int]] = {}
        self.started: dict[str, int] = {}
        self.failures, self.deaths, self.respawns = plan.failures, plan.deaths, plan.respawns
        self.killed: set[int] = set()
        self.host = Actor("host of iterations", -1, mortal=False, is_in=False)
        self.abandoned = 0
        self.stage.may_kill = self.may_kill

    def run(self) -> None:
        """Plays the script.

        Raises:
            Violation: see `check`, and a deadlock.
        """
        self.stage.start(self.host, lambda: serve_rounds(self.store, lambda: (object(), 1), "host", {}))
        for member in range(self.plan.ranks):
            rank = SimulatedRank(self, f"rank {member}", member)
            self.stage.start(rank.actor, rank.play)
        try:
            self.stage.run()
            self.check()
        finally:
            self.stage.abandon()

    def may_kill(self, actor: Actor) -> bool:
        """Whether the script kills this rank now."""
        if not actor.mortal or self.deaths == 0 or self.stage.choose(40) != 7:
            return False
        self.deaths -= 1
        return True

    def note_start(self, name: str, number: int, rank: int, world_size: int, member: int) -> None:
        """A rank begins a round."""
        if self.places.setdefault((number, rank), member) != member:
            raise Violation(f"rank {rank} of iteration {number} is two members")
        if self.sizes.setdefault(number, world_size) != world_size:
            raise Violation(f"iteration {number} has {world_size} and {self.sizes[number]} ranks")
        self.started[name] = number

    def check(self) -> None:
        """After the end: all that finished did so in one round, whose ranks are consecutive."""
        done = {number for phase, number in self.ends.values() if phase is RestartPhase.DONE}
        if len(done) > 1:
            raise Violation(f"done in iterations {done}")
        for number in done:
            ranks = {rank for where, rank in self.places if where == number}
            size = self.sizes[number] if self.plan.active is None else self.plan.active  # a spare may be slow
            if not ranks >= set(range(size)):
                raise Violation(f"iteration {number} has ranks {ranks} of {self.sizes[number]}")
        lost = [name for name, (phase, _) in self.ends.items() if phase is RestartPhase.LEFT]
        if lost and not self.stage.lines.count("time passes") and self.plan.active is None:
            raise Violation(f"healthy and lost: {lost}")


class SimulatedRank:
    """One process of a rank; `respawned` asks to join first."""

    def __init__(self, call: SimulatedCall, name: str, member: int, respawned: bool = False) -> None:
        self.call, self.store, self.stage = call, call.store, call.stage
        self.member, self.respawned = member, respawned
        self.actor = Actor(name, member, mortal=True, is_in=not respawned)
        self.number, self.rank, self.size = 0, member, call.plan.ranks
        self.undecided = 0
        self.closed: Closed | None = None
        self.keys: tuple[int, AssignmentStore] | None = None

    def play(self) -> None:
        """The process, and after its death whoever speaks for it."""
        try:
            self._live()
        except Killed:
            if not self.actor.doomed:
                self._speak_for()
            raise

    def _speak_for(self) -> None:
        call = self.call
        joining_only = not self.actor.is_in
        call.killed.add(self.member)

        def speak() -> None:
            try:
                if joining_only:
                    withdraw(self.store, self.member, RECORD, 100)
                else:
                    depart(self.store, self.member, RECORD, 100)
            except distributed.DistStoreError:
                alive = any(actor.mortal and actor.is_in and not actor.ended for actor in self.stage.actors)
                if alive and not call.plan.impatient:
                    raise
                return  # nobody is left
            if call.respawns:
                call.respawns -= 1
                again = SimulatedRank(call, f"{self.actor.name}'", self.member, respawned=True)
                self.stage.start(again.actor, again.play)

        agent = Actor(f"agent of {self.actor.name}", self.member, mortal=False, is_in=not joining_only)
        self.stage.start(agent, speak)

    def _live(self) -> None:
        if self.respawned and not self._join():
            return
        phase, event = RestartPhase.ASSIGNING, self._do(RestartAction.ASSIGN)
        while phase not in ENDS:
            phase, actions = step(phase, event)
            for action in actions:
                try:
                    event = self._do(action)
                except (ProtocolError, distributed.DistStoreError) as problem:
                    if phase in ENDS or not self.call.plan.impatient:
                        raise
                    self.stage.lines.append(f"{self.actor.name}: {problem}")
                    event = RestartEvent.ENDED
                if event is RestartEvent.ENDED:
                    break
        self.call.ends[self.actor.name] = (phase, self.number)

    def _join(self) -> bool:
        self.number = current(self.store)
        while Round(self.store, self.number).closing() is not None:
            self.number += 1
        joining(self.store).sign(Entry(self.member))
        while True:
            self.closed = closing_of(self.store, self.number)
            if self.closed is None:
                return False
            if self.member in self.closed.joined_members:
                break
            self.number += 1
        self.actor.is_in = True
        self.rank = self.closed.world_size + self.closed.joined_members.index(self.member)
        return True

    def _await(self, key: str, patient: bool = True) -> str:
        days = 10 if patient else 0
        self.store.wait([key], datetime.timedelta(days=days))
        return self.store.get(key).decode()

    def _next(self, key: str, events: dict[str, RestartEvent], patient: bool = False) -> RestartEvent:
        try:
            value = self._await(key, patient)
        except distributed.DistStoreError:
            self.stage.lines.append("time passes")
            return RestartEvent.LATE
        for beginning, event in events.items():
            if value.startswith(beginning):
                return event
        raise Violation(f"{key} has {value!r}")

    def _do(self, action: RestartAction) -> RestartEvent:
        iteration, entry = Round(self.store, self.number), Entry(self.member, self.rank, self.size)
        outcome = {DONE: RestartEvent.DONE, FAULT: RestartEvent.INTERRUPTED}
        match action:
            case RestartAction.ASSIGN:
                return self._assign()
            case RestartAction.ARRIVE:
                iteration.arrive(entry)
                return self._next(iteration.started, {GO: RestartEvent.STARTED, FAULT: RestartEvent.INTERRUPTED})
            case RestartAction.PREPARE:
                self.call.note_start(self.actor.name, self.number, self.rank, self.size, self.member)
                if self.rank == 0:
                    tidy(self.store, self.number)
                return RestartEvent.READY if self.rank < self.active else RestartEvent.SPARE
            case RestartAction.WAIT:
                return self._next(iteration.outcome, outcome, patient=not self.call.plan.impatient)
            case RestartAction.RUN:
                return self._function(iteration)
            case RestartAction.ANNOUNCE:
                iteration.announce_return(entry, self.active)
                return self._next(iteration.outcome, outcome)
            case RestartAction.REPORT:
                iteration.interrupt(RECORD)
                return RestartEvent.FAILED
            case RestartAction.AWAIT_ABORT | RestartAction.FINALIZE:
                return RestartEvent.RECOVERED if action is RestartAction.FINALIZE else RestartEvent.INTERRUPTED
            case RestartAction.ACCOUNT:
                iteration.account(entry)
                return self._closing(iteration)
            case RestartAction.INTERRUPT_FOR_ABSENT | RestartAction.EXPEL:
                roll = iteration.end if action is RestartAction.EXPEL else iteration.start
                for member in iteration.missing(roll, self.call.plan.ranks):
                    iteration.interrupt(RECORD)
                    iteration.account(Entry(member, is_well=False))
                return (
                    self._closing(iteration)
                    if action is RestartAction.EXPEL
                    else self._next(iteration.outcome, outcome)
                )
            case RestartAction.INTERRUPT_FOR_UNFINISHED:
                iteration.interrupt(RECORD)
                return self._next(iteration.outcome, outcome)
            case RestartAction.COMPLETE:
                return RestartEvent.DONE
        return self._leave(action)

    def _assign(self) -> RestartEvent:
        if self.closed is not None:
            self.size = self.closed.world_size + len(self.closed.joined_members)
            gone = self.closed.terminated_ranks
            self.rank -= sum(other < self.rank for other in gone)
            self.size -= len(gone)
            self.number += 1
        self.undecided = self.size
        try:
            for _ in range(self.call.plan.gathers):
                self._gather()
        except GatherAbandoned:
            self.call.abandoned += 1
            return RestartEvent.INTERRUPTED
        except (ProtocolError, distributed.DistStoreError):
            if not self.call.plan.impatient:
                raise
            self.stage.lines.append("time passes")
            return RestartEvent.ENDED
        if self.active < (self.call.plan.active or 0):
            return RestartEvent.ENDED
        self.undecided = 0
        return RestartEvent.ASSIGNED

    def _gather(self) -> None:
        """All ranks, without gaps by now, tell each other who they are."""
        if self.keys is None or self.keys[0] != self.number:
            self.keys = self.number, AssignmentStore(self)
        found = self.keys[1].gathers.make(range(self.size), self.rank, str(self.member), None)
        if found[self.rank] != str(self.member) or len(set(found)) != self.size:
            raise Violation(f"{self.actor.name} gathered {found}")

    @property
    def active(self) -> int:
        return self.size if self.call.plan.active is None else min(self.size, self.call.plan.active)

    def _leave(self, action: RestartAction) -> RestartEvent:
        """Only who is taken for lost, or has too few others, leaves."""
        if not self.call.plan.impatient and (action is RestartAction.LEAVE or not self.undecided):
            raise Violation(f"{self.actor.name} leaves: {action.name}")
        if action is RestartAction.LEAVE:
            return RestartEvent.ENDED
        try:
            depart(self.store, self.member, RECORD, 100, self.undecided)
        except distributed.DistStoreError:
            self.stage.lines.append(f"{self.actor.name}: nobody took note")
            if not self.call.plan.impatient and not self.call.killed:
                raise
        return RestartEvent.ENDED

    def _closing(self, iteration: Round) -> RestartEvent:
        event = self._next(iteration.closed, {"{": RestartEvent.CLOSED})
        if event is RestartEvent.LATE:
            return event
        self.closed = Closed.read(self.store.get(iteration.closed))
        return RestartEvent.CLOSED if self.closed.has(self.member) else RestartEvent.EXCLUDED

    def _function(self, iteration: Round) -> RestartEvent:
        """Returns, fails, or is interrupted when there is a fault."""
        call = self.call
        if call.failures and self.stage.choose(3) == 1:
            call.failures -= 1
            return RestartEvent.FAILED
        self.stage.pause(f"works in iteration {iteration.number}")
        if self.store.values.get(iteration.outcome) == FAULT.encode():
            return RestartEvent.INTERRUPTED
        return RestartEvent.RETURNED


def play(plan: Plan, script: list[int]) -> SimulatedCall:
    """Runs a script to its end."""
    call = SimulatedCall(plan, script)
    call.run()
    return call


def script_of(seed: int, length: int = 4000) -> list[int]:
    """A script from a seed."""
    source = random.Random(seed)
    return [source.randrange(420) for _ in range(length)]


def shrink(plan: Plan, script: list[int]) -> list[int]:
    """A script that fails too, with as few and as small numbers as a short search finds."""

    def fails(candidate: list[int]) -> bool:
        try:
            play(plan, candidate)
        except Exception:
            return True
        return False

    size = len(script) // 2
    while size:
        at = 0
        while at < len(script):
            for candidate in (script[:at] + script[at + size :], script[:at] + [0] * size + script[at + size :]):
                if candidate != script and fails(candidate):
                    script = candidate
                    break
            at += size
        size //= 2
    return script
