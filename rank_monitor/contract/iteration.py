"""One iteration of an in-process restart, as it stands in the ranks' store: what is written where, and by whom.

Ranks write here, and so does whoever speaks for a rank that died (`departure.py`): the node agent, or the companion of
a standalone rank. Works on any store with torch's operations, takes no lock and keeps nothing: each step is one atomic
operation, so that whoever is killed between two of them leaves nothing that the next one cannot complete.

    note      where the function finds the iteration's store server; offered by who serves it (`iteration_stores.py`)
    started   "fault", or "go" and the note: released when every rank came to the start; or "end" and why there is to be
              no further iteration
    outcome   "fault" or "done": released by the first fault, or by the last active rank that returned
    closed    `Closed`: released when every rank came to the end of a failed iteration, or is terminated
    records   why the iteration was interrupted

A released key is written once, by compare-and-set. Who came to a barrier stands on its roll (`roll.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from rank_monitor.contract import observers
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.foreign import parse_json, whole_number
from rank_monitor.contract.json_record import from_json
from rank_monitor.contract.roll import MOST_MEMBERS, Entry, Roll, Store, leave_out, ranges_of, ranks_in, release

GO, FAULT, DONE, END = "go", "fault", "done", "end"
_MAX_RECORDS = 64
_MOST_ITERATIONS = 1 << 31
"""A restart takes milliseconds: so many would take months."""
_CURRENT, _FORGOTTEN = "iteration", "forgotten"


@dataclass(frozen=True)
class Closed:
    """How a failed iteration of `world_size` ranks ended.

    Ranks and members are ranges (`roll.ranges_of`). `terminated` are the ranks, as the iteration counted them, that do
    not take part in the next. `members` may. `joined` are members that come in anew, with the next numbers after the
    last rank, in their order; `taken` counts the wishes to join that were read so far.
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
            ProtocolError: it is none.
        """
        try:
            closed = from_json(cls, parse_json(written))
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
        """The members that come in anew, in the order of their numbers."""
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
        self.start, self.returned, self.end = (Roll(store, f"{number}/{name}") for name in ("start", "return", "end"))
        self._records, self._note = f"{number}/records", f"{number}/note"

    def offer(self, note: str) -> None:
        """Tells what the ranks get at the start; a later offer counts, as long as they have not started."""
        self._store.set(self._note, note)

    def arrive(self, entry: Entry, why_end: Callable[[], str] = str) -> None:
        """Comes to the start. The last one releases it, with the note; it waits for one to be offered.

        Args:
            why_end: called by the last one: why there is to be no further iteration, empty where there is.
        """
        if self.start.complete(entry, entry.world_size):
            self._make_current()
            reason = why_end()
            note = self._store.get(self._note).decode()
            release(self._store, self.started, END + reason if reason else GO + note)
            self._must_be_kept()

    def announce_return(self, entry: Entry, active_world_size: int) -> None:
        """The function returned on an active rank; the last one ends the call."""
        if self.returned.complete(entry, active_world_size):
            release(self._store, self.outcome, DONE)
            self._must_be_kept()

    def interrupt(self, record: str) -> None:
        """Writes why, and interrupts the iteration on every rank, wherever it is; no effect once it is over."""
        number = self._store.add(f"{self._records}/count", 1)
        if number <= _MAX_RECORDS:
            self._store.set(f"{self._records}/{number}", record)
        release(self._store, self.started, FAULT)
        release(self._store, self.outcome, FAULT)

    def account(self, entry: Entry) -> None:
        """Comes to the end of a failed iteration; or, not being well, tells that a member will not come."""
        if not entry.is_well:
            self.end.sign(entry)
            self._close_if_complete()
        elif self.end.complete(entry, entry.world_size):
            self._close_if_complete()

    def missing(self, roll: Roll, of: Iterable[int]) -> list[int]:
        """Members among `of` that did not sign a roll and may still."""
        gone = {entry.member for entry in [*roll.entries(), *discarded(self._store).entries()]}
        members = self._members()
        return [member for member in of if member not in gone and (members is None or member in members)]

    def everybody(self, world_size: int) -> list[int]:
        """The members that may take part, where at entry there were `world_size`."""
        members = self._members()
        return list(range(world_size)) if members is None else sorted(members)

    def records(self) -> list[str]:
        """Why the iteration was interrupted, the first 64 of them."""
        keys = (f"{self._records}/{number + 1}" for number in range(self._recorded()))
        return [self._store.get(key).decode() for key in keys if self._store.check([key])]

    def forget(self) -> None:
        """Deletes every key of the iteration."""
        keys = [self.started, self.outcome, self.closed, self._note, f"{self._records}/count"]
        keys += [f"{self._records}/{number + 1}" for number in range(self._recorded())]
        for roll in (self.start, self.returned, self.end):
            keys += roll.keys()
        for key in keys:
            self._store.delete_key(key)

    def closing(self) -> Closed | None:
        """How it ended; None: it did not, or that was forgotten."""
        return Closed.read(self._store.get(self.closed)) if self._store.check([self.closed]) else None

    def may_have(self, member: int) -> bool:
        """Whether a member may take part: it was not terminated before, and no rank assignment discarded it."""
        members = self._members()
        is_discarded = any(entry.member == member for entry in discarded(self._store).entries())
        return not is_discarded and (members is None or member in members)

    def _make_current(self) -> None:
        """Unless a later one is: whoever writes this may have been stopped since."""
        _raise_to(self._store, _CURRENT, self.number)

    def _recorded(self) -> int:
        return min(self._store.add(f"{self._records}/count", 0), _MAX_RECORDS)

    def _before(self) -> Closed | None:
        """How the iteration before ended; None: there was none, or nothing was closed.

        Raises:
            ProtocolError: this one is forgotten.
        """
        before = Iteration(self._store, self.number - 1).closing() if self.number else None
        self._must_be_kept()
        return before

    def _members(self) -> set[int] | None:
        """The members that may take part; None: all there ever were.

        Raises:
            ProtocolError: the iteration is forgotten.
        """
        before = self._before()
        return None if before is None else before.all_members

    def _must_be_kept(self) -> None:
        """To be called after what it guards: an iteration is marked as forgotten before anything of it is deleted.

        Raises:
            ProtocolError: the iteration was closed long since, and is forgotten. Whoever was stopped for so long must
                decide nothing here: it would go on with itself alone.
        """
        if self.number < (kept := first_kept(self._store)):
            raise ProtocolError(f"iteration {self.number} is forgotten: the others are beyond iteration {kept}")

    def _close_if_complete(self) -> None:
        """Closes when every rank is accounted for. A member counts as lost as soon as one entry says so."""
        entries = self.end.entries()
        before = self._before()
        members = None if before is None else before.all_members
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
        taken = 0 if before is None else before.taken
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
    """The iteration that was last begun by all; 0 before the first."""
    return _number_at(store, _CURRENT)


@contextmanager
def observing(store: Store, member: int, is_dead: bool) -> Iterator[int]:
    """For whoever takes no part: nothing is forgotten from the iteration on that is current, and given, here.

    It is the member that observes, or whoever speaks for one whose process `is_dead`.
    """
    with observers.noted(store, member, is_dead):
        yield current(store)


def tidy(store: Store, number: int) -> None:
    """Deletes iterations of which nothing is needed. Called by one rank, once all have begun iteration `number`.

    The end of the last one is still read; and while somebody observes, everything is kept for later.
    """
    if number < 2 or observers.are_there(store):
        return
    first = first_kept(store)
    _raise_to(store, _FORGOTTEN, number - 1)
    for old in range(first, number - 1):
        Iteration(store, old).forget()


def _raise_to(store: Store, key: str, number: int) -> None:
    """Makes the number at a key this one, unless it is greater."""
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


def joining(store: Store) -> Roll:
    """Members that want to come in anew, or (not well) do not any more."""
    return Roll(store, "joining")


def discarded(store: Store) -> Roll:
    """Members that a rank assignment gave no place."""
    return Roll(store, "discarded")
