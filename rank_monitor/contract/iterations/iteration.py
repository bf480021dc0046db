"""One iteration of an in-process restart: its keys in the ranks' store, and the operations on them.

Ranks write these keys, and so does the process that speaks for a dead rank (`rank_departure.py`): the node agent, or
the companion of a standalone rank. Works on any store with torch's operations, takes no lock and keeps no state: each
step is one atomic operation, so that a process killed between two of them leaves nothing that the next cannot complete.

    note      where the function finds the iteration's store server; offered by its host (`iteration_stores.py`)
    started   "fault", or "go" and the note: released when every rank has arrived at the start; or "end" and the reason
              why there is no further iteration
    outcome   "fault" or "done": released by the first fault, or by the last active rank that returned
    closed    `Closed`: released when every rank has arrived at the end of a failed iteration, or is terminated
    records   why the iteration was interrupted
    blame     who held up the others, where a launcher saw it before the interruption

A released key is written once, by compare-and-set, and is "gone" when the iteration is forgotten. Arrivals at a barrier
are those of `barrier.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.iterations.barrier import (
    MOST_MEMBERS,
    Arrivals,
    Entry,
    Store,
    leave_out,
    ranges_of,
    ranks_in,
    release,
)
from rank_monitor.contract.wire.foreign import whole_number
from rank_monitor.contract.wire.json_record import read_record

GO, FAULT, DONE, END = "go", "fault", "done", "end"
GONE = "gone"
"""In the place of `started`, `outcome` and `closed` once an iteration is forgotten: a process that was stopped just
before it began to wait for one of them would wait for ever, were the key deleted. A wait with a limit that looks again
is no way: torch writes two warnings to the console whenever one is over."""
_MARKS_KEPT = 100
"""Of so many iterations, some 20 KB: who is stopped between two instructions for longer is lost."""
# A fault of one rank can fail all others as well: without a bound each of them would add a record.
_MAX_RECORDS = 64
_MOST_ITERATIONS = 1 << 31
"""A restart takes milliseconds: so many would take months."""
_CURRENT, _FORGOTTEN, _OBSERVERS = "iteration", "forgotten", "observers"
_COMES, _GOES, _IS_DEAD = "+", "-", "!"
"""What a line of the log of observers begins with."""


@dataclass(frozen=True)
class Closed:
    """How a failed iteration of `world_size` ranks ended.

    Ranks and members are ranges (`barrier.ranges_of`). `terminated`: ranks of this iteration that do not take part in
    the next. `members`: those that may. `joined`: members that join anew, with the next numbers after the last rank,
    in their order. `taken`: the number of requests to join that were read so far.
    """

    world_size: int
    terminated: str
    members: str
    joined: str
    taken: int

    @classmethod
    def read(cls, written: bytes) -> Closed:
        """The value of a `closed` key.

        Raises:
            ProtocolError: the value is not such a one.
        """
        closed = read_record(cls, written)
        try:
            for ranges in (closed.terminated, closed.members, closed.joined):
                ranks_in(ranges)
            if not 0 <= closed.world_size <= MOST_MEMBERS or closed.taken < 0:
                raise ValueError(f"world_size={closed.world_size}, taken={closed.taken}")
            return closed
        except ValueError as problem:
            raise ProtocolError(f"Closed: {problem}") from None

    @property
    def terminated_ranks(self) -> set[int]:
        """The ranks that do not take part in the next iteration."""
        return ranks_in(self.terminated)

    @property
    def all_members(self) -> set[int]:
        """The members that may take part in the next iteration."""
        return ranks_in(self.members) | ranks_in(self.joined)

    @property
    def joined_members(self) -> list[int]:
        """The members that join anew, in the order of their numbers."""
        return sorted(ranks_in(self.joined))

    def has(self, member: int) -> bool:
        """Whether a member may take part in the next iteration."""
        return member in self.all_members


class Iteration:
    """The keys of iteration `number` of one call.

    Args:
        store: of that call only.
        number: from 0.
    """

    def __init__(self, store: Store, number: int) -> None:
        self.number = number
        self._store = store
        self.started, self.outcome, self.closed = (f"{number}/{name}" for name in ("started", "outcome", "closed"))
        self.start, self.returned, self.end = (
            Arrivals(store, f"{number}/{name}") for name in ("start", "return", "end")
        )
        self._awaited = (self.started, self.outcome, self.closed)
        self._records, self._note, self._blame = (f"{number}/{name}" for name in ("records", "note", "blame"))

    def offer(self, note: str) -> None:
        """Writes the note that the ranks get at the start. Until they have started, a later one replaces it."""
        self._store.set(self._note, note)

    def arrive(self, entry: Entry, why_end: Callable[[], str] = str) -> None:
        """Enters the barrier at the start. The last rank waits for a note and releases the barrier with it.

        Args:
            why_end: called on the last rank; returns why there is no further iteration, empty if there is one.
        """
        if self.start.complete(entry, entry.world_size):
            self._make_current()
            reason = why_end()
            note = self._store.get(self._note).decode()
            if reason:
                release(self._store, self.started, END + reason)
            else:
                release(self._store, self.started, GO + note)
            self._must_be_kept()

    def announce_return(self, entry: Entry, active_world_size: int) -> None:
        """Reports that the function returned on an active rank. The last one ends the call."""
        if self.returned.complete(entry, active_world_size):
            release(self._store, self.outcome, DONE)
            self._must_be_kept()

    def interrupt(self, record: str) -> None:
        """Writes the reason, and interrupts the iteration on every rank. No effect once the iteration is over."""
        number = self._store.add(f"{self._records}/count", 1)
        if number <= _MAX_RECORDS:
            self._store.set(f"{self._records}/{number}", record)
        release(self._store, self.started, FAULT)
        release(self._store, self.outcome, FAULT)

    def account(self, entry: Entry) -> None:
        """Enters the barrier at the end of a failed iteration; with `is_well` false, reports that a member is lost."""
        if not entry.is_well:
            self.end.sign(entry)
            self._close_if_complete()
        elif self.end.complete(entry, entry.world_size):
            self._close_if_complete()

    def missing(self, arrivals: Arrivals, of: Iterable[int]) -> list[int]:
        """The members among `of` that have not arrived at a barrier and may still do so."""
        gone = {entry.member for entry in [*arrivals.entries(), *discarded(self._store).entries()]}
        members = self._members()
        return [member for member in of if member not in gone and (members is None or member in members)]

    def everybody(self, world_size: int) -> list[int]:
        """The members that may take part, where at entry there were `world_size`."""
        members = self._members()
        if members is None:
            return list(range(world_size))
        return sorted(members)

    def is_over(self) -> bool:
        """Whether it was interrupted, or all have returned. Does not wait."""
        return self._store.check([self.outcome])

    def records(self) -> list[str]:
        """Why the iteration was interrupted, the first 64 of them."""
        keys = (f"{self._records}/{number + 1}" for number in range(self._recorded()))
        return [self._store.get(key).decode() for key in keys if self._store.check([key])]

    def set_blame(self, blame: str) -> None:
        """Writes who held up the others of the interrupted iteration."""
        self._store.set(self._blame, blame)

    def blame(self) -> str:
        """What `set_blame` wrote; empty: nothing. Does not wait."""
        if not self._store.check([self._blame]):
            return ""
        return str(self._store.get(self._blame).decode())

    def forget(self) -> None:
        """Deletes every key of the iteration, but for a mark in the place of those that are awaited."""
        for key in self._awaited:
            self._store.set(key, GONE)
        keys = [
            self._note,
            self._blame,
            f"{self._records}/count",
            *Iteration(self._store, self.number - _MARKS_KEPT)._awaited,
        ]
        keys += [f"{self._records}/{number + 1}" for number in range(self._recorded())]
        for arrivals in (self.start, self.returned, self.end):
            keys += arrivals.keys()
        for key in keys:
            self._store.delete_key(key)

    def closing(self) -> Closed | None:
        """How the iteration ended; None: it has not ended, or was forgotten."""
        if not self._store.check([self.closed]):
            return None
        written = self._store.get(self.closed)
        if written == GONE.encode():
            return None
        return Closed.read(written)

    def may_have(self, member: int) -> bool:
        """Whether a member may take part: it was not terminated before, and no rank assignment discarded it."""
        members = self._members()
        is_discarded = any(entry.member == member for entry in discarded(self._store).entries())
        return not is_discarded and (members is None or member in members)

    def _make_current(self) -> None:
        """Writes this iteration as the current one, unless a later one is: this process may have been stopped since."""
        _raise_to(self._store, _CURRENT, self.number)

    def _recorded(self) -> int:
        return min(self._store.add(f"{self._records}/count", 0), _MAX_RECORDS)

    def _before(self) -> Closed | None:
        """How the previous iteration ended; None: there was none, or it was not closed.

        Raises:
            ProtocolError: this one is forgotten.
        """
        if self.number:
            before = Iteration(self._store, self.number - 1).closing()
        else:
            before = None
        self._must_be_kept()
        return before

    def _members(self) -> set[int] | None:
        """The members that may take part; None: all that entered the call.

        Raises:
            ProtocolError: the iteration is forgotten.
        """
        before = self._before()
        if before is None:
            return None
        return before.all_members

    def _must_be_kept(self) -> None:
        """Checks that the iteration was not forgotten while its keys were read. To be called after reading them.

        An iteration is marked as forgotten before anything of it is deleted.

        Raises:
            ProtocolError: the iteration is forgotten. A process that was stopped for so long must decide nothing from
                its keys: it would go on by itself alone.
        """
        kept = first_kept(self._store)
        if self.number < kept:
            raise ProtocolError(f"iteration {self.number} is forgotten: the others are beyond iteration {kept}")

    def _close_if_complete(self) -> None:
        """Closes the iteration when every rank is accounted for. One entry that says so makes a member lost."""
        entries = self.end.entries()
        before = self._before()
        if before is None:
            members = None
        else:
            members = before.all_members
        lost = {entry.member for entry in entries if not entry.is_well}
        if members is not None:
            lost &= members
        well = {entry.member: entry.rank for entry in entries if entry.is_well and entry.member not in lost}
        world_size = max((entry.world_size for entry in entries if entry.is_well), default=0)
        if not world_size:  # nobody is well
            world_size = max((entry.world_size for entry in [*self.start.entries(), *entries]), default=0)
        if not world_size or len(well) + len(lost) < world_size:
            return
        wishes = joining(self._store).entries()
        if before is None:
            taken = 0
        else:
            taken = before.taken
        joined = {entry.member: entry.is_well for entry in wishes[taken:]}
        closed = Closed(
            world_size,
            ranges_of(set(range(world_size)) - set(well.values())),
            ranges_of(well),
            ranges_of(member for member, is_well in joined.items() if is_well and member not in well),
            len(wishes),
        )
        release(self._store, self.closed, json.dumps(asdict(closed)))
        self._must_be_kept()


def current(store: Store) -> int:
    """The iteration that all ranks began last; 0 before the first."""
    return _number_at(store, _CURRENT)


@contextmanager
def observing(store: Store, member: int, is_dead: bool) -> Iterator[int]:
    """A context for a process that reads iterations without taking part. Gives the number of the current iteration.

    Inside, no iteration from that one on is forgotten. The observer is the member itself, while it asks to join or
    leaves, or the process that speaks for a member whose process `is_dead`. It begins and ends by one append to a log,
    and the one that speaks for a member also cancels what the dead process left there. So a process that is killed at
    any moment leaves no entry in force.
    """
    who, cancelled = f"{member}", ""
    if is_dead:
        who, cancelled = f"for{member}", f"{_IS_DEAD}{member}\n"
    store.append(_OBSERVERS, f"{cancelled}{_COMES}{who}\n")
    try:
        yield current(store)
    finally:
        store.append(_OBSERVERS, f"{_GOES}{who}\n")


def is_observed(store: Store) -> bool:
    """Whether any process observes. Takes one operation of the store; if none does, the log is emptied."""
    log = store.compare_set(_OBSERVERS, "", "").decode(errors="replace")
    there: Counter[str] = Counter()
    for line in log.splitlines():
        what, who = line[:1], line[1:]
        if what not in (_COMES, _GOES, _IS_DEAD):
            leave_out(_OBSERVERS)
        elif what == _COMES:
            there[who] += 1
        elif what == _IS_DEAD or there[who] <= 1:  # it may be silent and not dead, and go later
            del there[who]
        else:
            there[who] -= 1
    if log and not there:
        store.compare_set(_OBSERVERS, log, "")
    return bool(there)


def tidy(store: Store, number: int) -> None:
    """Deletes the iterations that are not needed any more. Called by one rank, once all have begun iteration `number`.

    The end of the previous one is still read. While a process observes, nothing is deleted.
    """
    if number < 2 or is_observed(store):
        return
    first = first_kept(store)
    _raise_to(store, _FORGOTTEN, number - 1)
    for old in range(first, number - 1):
        Iteration(store, old).forget()


def _raise_to(store: Store, key: str, number: int) -> None:
    """Sets the number at a key to this one, unless it is greater."""
    now = ""
    while not now or int(now) < number:
        found = store.compare_set(key, now, str(number))
        if whole_number(found, _MOST_ITERATIONS) is None:
            leave_out(key)
            store.set(key, "0")
            found = b"0"
        now = found.decode()


def first_kept(store: Store) -> int:
    """The first iteration that is not forgotten."""
    return _number_at(store, _FORGOTTEN)


def _number_at(store: Store, key: str) -> int:
    """The number of an iteration under a key; 0 where there is none."""
    if not store.check([key]):
        return 0
    number = whole_number(store.get(key), _MOST_ITERATIONS)
    if number is None:
        leave_out(key)
    return number or 0


def joining(store: Store) -> Arrivals:
    """Requests of members to join; with `is_well` false, that a member does not want to join any more."""
    return Arrivals(store, "joining")


def discarded(store: Store) -> Arrivals:
    """Members to which the rank assignment gave no rank."""
    return Arrivals(store, "discarded")
