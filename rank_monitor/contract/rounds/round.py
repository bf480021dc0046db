"""One round of an in-process restart: its keys in the ranks' store, and the operations on them.

`client/ft_client/inprocess/restart/` makes a `Round` in each rank. For a dead rank `agent/in_process/rank_loss.py`
writes the keys (`depart`, `withdraw`): it runs in the node agent, or in the standalone agent where there is no
launcher.

A `Round` works on any store with torch's operations, takes no lock and keeps no state. Each step is one atomic
operation, so that a process killed between two steps leaves nothing that the next process cannot complete.

**A round** goes through these steps; `contract/restart_phase.py` has the phase of a rank in each.

1. Each rank arrives at the start (`arrive`). The last one releases `started`, with the store address or with a reason
   to end.
2. The function runs. A rank whose function returns reports it (`announce_return`); the last one releases `outcome` as
   "done", and the call is over on all ranks.
3. Or a fault is written (`interrupt`): by the rank that has it, by a rank whose monitor asks for a restart, or by the
   process that speaks for a dead rank. This releases `outcome`, and `started` if the round had not started, as "fault".
   Every rank waits for `outcome` in a thread, and is interrupted.
4. Each rank that is ready to go on accounts for itself (`account`); a dead one is accounted for by the process that
   speaks for it. When all are, `closed` says who takes part in the next round.

**The keys**, each after the number of the round:

    store     the store address: where the function finds the round's store server; offered by its host
              (`round_stores.py`)
    started   "fault", or "go" and the store address: released when every rank has arrived at the start; or "end" and
              the reason why there is no further round
    outcome   "fault" or "done": released by the first fault, or by the last active rank that returned
    closed    `Closed`: released when every rank has arrived at the end of a failed round, or is terminated
    records   why the round was interrupted
    culprit   who held up the others, where a launcher saw it before the interruption

A released key (`started`, `outcome`, `closed`) is written once, by compare-and-set. Released keys and the store
address stay as long as the store: some 300 bytes for each round. Ranks wait for these keys only, so only these keys
may be read by a `get` that waits. (The host of the store may replace the store address until the round starts.) Hence
a process that was stopped in an old round neither waits without end nor releases anything anew: it follows the
released keys from round to round, until it finds the round that closed without it. All other keys of a round are
deleted when no rank needs them any more (`tidy`), and read by `value_now`.

Beside its rounds a call has three keys that are never deleted: `round`, the number of the last round that all ranks
have begun; `joining`, the requests to join; `discarded`, the ranks that got no place. They and the barriers `start`,
`return` and `end` of a round are counted as `barrier.py` explains.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.rounds.barrier import (
    EVER,
    MAX_MEMBERS,
    Arrivals,
    Entry,
    Store,
    leave_out,
    ranges_of,
    ranks_in,
    release,
    value_now,
)
from rank_monitor.contract.wire.foreign import whole_number
from rank_monitor.contract.wire.json_record import read_record, write_record

GO, FAULT, DONE, END = "go", "fault", "done", "end"
_MAX_RECORDS = 64
"""Records of one interruption that are kept. A fault of one rank can fail all others as well: without a bound each of
them would add a record."""
_MAX_ITERATIONS = 1 << 31
"""Rounds of one call; a greater number in the store is none of ours. A restart takes milliseconds, so that many would
take months."""
_CURRENT = "round"
"""The key of the number of the round that all ranks have begun last."""


@dataclass(frozen=True)
class Closed:
    """How a failed round ended: the value of its `closed` key. Ranks and members are text of ranges (`ranges_of`).

    Attributes:
        world_size: the ranks of the round.
        terminated: ranks of this round that do not take part in the next.
        members: members that may take part in the next.
        joined: members that join anew. They get the numbers after the last rank, in their order.
        taken: how many requests to join were read so far, of all there ever were.
    """

    world_size: int
    terminated: str
    members: str
    joined: str
    taken: int

    @classmethod
    def read(cls, written: bytes) -> Closed:
        """Reads the value of a `closed` key.

        Raises:
            ProtocolError: the value is no such record, or has numbers that no rank has.
        """
        closed = read_record(cls, written)
        try:
            for ranges in (closed.terminated, closed.members, closed.joined):
                ranks_in(ranges)
            if not 0 <= closed.world_size <= MAX_MEMBERS or closed.taken < 0:
                raise ValueError(f"world_size={closed.world_size}, taken={closed.taken}")
            return closed
        except ValueError as problem:
            raise ProtocolError(f"Closed: {problem}") from None

    @property
    def terminated_ranks(self) -> set[int]:
        """The ranks that do not take part in the next round."""
        return ranks_in(self.terminated)

    @property
    def all_members(self) -> set[int]:
        """The members that may take part in the next round."""
        return ranks_in(self.members) | ranks_in(self.joined)

    @property
    def joined_members(self) -> list[int]:
        """The members that join anew, in the order of their numbers."""
        return sorted(ranks_in(self.joined))

    def has(self, member: int) -> bool:
        """Whether a member may take part in the next round."""
        return member in self.all_members


class Round:
    """The keys of round `number` of one call. Makes nothing and costs nothing: made wherever it is needed.

    Args:
        store: the keys of this call only (a `PrefixStore` where the store holds more).
        number: of the round, from 0.
    """

    def __init__(self, store: Store, number: int) -> None:
        self.number = number
        self._store = store
        self.started, self.outcome, self.closed = (f"{number}/{name}" for name in ("started", "outcome", "closed"))
        self.start, self.returned, self.end = (
            Arrivals(store, f"{number}/{name}") for name in ("start", "return", "end")
        )
        self._records, self.store_address, self._culprit = (
            f"{number}/{name}" for name in ("records", "store", "culprit")
        )

    def offer(self, store_address: str) -> None:
        """Writes the store address that the ranks get at the start. Until the round starts, a later one replaces it."""
        self._store.set(self.store_address, store_address)

    def arrive(self, entry: Entry, reason_to_give_up: Callable[[], str] = str) -> None:
        """Enters the barrier at the start. Does not wait for the others: that is waiting for `started`.

        The last rank waits for the store address, and releases the barrier with it.

        Args:
            entry: the arrival of this rank.
            reason_to_give_up: called on the last rank; returns why there is no further round, empty if there is one.
        """
        if self.start.complete(entry, entry.world_size):
            # A rank that was stopped for long may lower the number. A reader then follows the ends of more rounds.
            self._store.set(_CURRENT, str(self.number))
            reason = reason_to_give_up()
            store_address = self._store.get(self.store_address).decode()
            if reason:
                release(self._store, self.started, END + reason)
            else:
                release(self._store, self.started, GO + store_address)

    def announce_return(self, entry: Entry, active_world_size: int) -> None:
        """Reports that the function returned on an active rank. The last such rank ends the call on all ranks."""
        if self.returned.complete(entry, active_world_size):
            release(self._store, self.outcome, DONE)

    def interrupt(self, record: str) -> None:
        """Writes the reason, and interrupts the round on every rank. No effect once the round is over.

        Args:
            record: JSON of an interruption (`inprocess/attribution.py`). Beyond the first 64, records are dropped.
        """
        number = self._store.add(f"{self._records}/count", 1)
        if number <= _MAX_RECORDS:
            self._store.set(f"{self._records}/{number}", record)
        release(self._store, self.started, FAULT)
        release(self._store, self.outcome, FAULT)

    def account(self, entry: Entry) -> None:
        """Enters the barrier at the end of a failed round; with `is_well` false, reports that a member is lost.

        Does not wait: that is waiting for `closed`. The entry that completes the barrier closes the round; after each
        report of a loss this is checked too, since the report may be what was missing.
        """
        if not entry.is_well:
            self.end.sign(entry)
            self._close_if_complete()
        elif self.end.complete(entry, entry.world_size):
            self._close_if_complete()

    def missing(self, arrivals: Arrivals, world_size: int) -> list[int]:
        """Returns the members that have not arrived at a barrier and may still do so; none once the round is closed.

        Args:
            arrivals: the barrier, of this round.
            world_size: the number of ranks at entry of the call.
        """
        if self.closing() is not None:  # the entries may be deleted by now
            return []
        gone = {entry.entry_rank for entry in [*arrivals.entries(), *discarded(self._store).entries()]}
        return sorted(self.everybody(world_size) - gone)

    def everybody(self, world_size: int) -> set[int]:
        """Returns the members that may take part in this round. `world_size`: the ranks at entry of the call."""
        before = self._before()
        if before is None:
            return set(range(world_size))
        return before.all_members

    def is_over(self) -> bool:
        """Whether the round was interrupted, or the function has returned on all ranks. Does not wait."""
        return self._store.check([self.outcome])

    def records(self) -> list[str]:
        """Returns why the round was interrupted: the first 64 records, in their order."""
        keys = (f"{self._records}/{number + 1}" for number in range(self._recorded()))
        found = (value_now(self._store, key) for key in keys)
        return [record.decode() for record in found if record is not None]

    def set_culprit(self, culprit: str) -> None:
        """Writes who held up the other ranks of the round, before it is interrupted for a hang."""
        self._store.set(self._culprit, culprit)

    def culprit(self) -> str:
        """Returns what `set_culprit` wrote; empty: nothing. Does not wait."""
        return (value_now(self._store, self._culprit) or b"").decode()

    def has_keys(self) -> bool:
        """Whether ranks have arrived at the end of the round, and `delete_keys` was not called since."""
        return self._store.check(self.end.keys())

    def delete_keys(self) -> None:
        """Deletes the keys of the round, except the released ones and the store address.

        The store address stays, since the last rank at the start waits for it. A rank that was stopped there until the
        other ranks had gone on without it would wait for a deleted address until its store gives up.
        """
        keys = [self._culprit]
        keys += [f"{self._records}/{number + 1}" for number in range(self._recorded())]
        keys.append(f"{self._records}/count")
        for arrivals in (self.start, self.returned, self.end):  # the end last: `has_keys` goes by it
            keys += arrivals.keys()
        for key in keys:
            self._store.delete_key(key)

    def closing(self) -> Closed | None:
        """Returns how the round ended; None: it has not ended, or not by a fault. Does not wait."""
        if not self._store.check([self.closed]):
            return None
        return Closed.read(self._store.get(self.closed))

    def may_have(self, member: int) -> bool:
        """Whether a member may take part in this round: it was not terminated before, and no rank assignment has
        discarded it."""
        before = self._before()
        is_discarded = any(entry.entry_rank == member for entry in discarded(self._store).entries())
        return not is_discarded and (before is None or before.has(member))

    def _recorded(self) -> int:
        return min(self._store.add(f"{self._records}/count", 0), _MAX_RECORDS)

    def _before(self) -> Closed | None:
        """Returns how the previous round ended; None: there was none."""
        if self.number == 0:
            return None
        return Round(self._store, self.number - 1).closing()

    def _close_if_complete(self) -> None:
        """Closes the round when every rank is accounted for. Called by several processes at once: `release` makes one
        of them the writer, and all come to a value that is right.

        One entry with `is_well` false makes a member lost, whatever other entries say: its process is dead. An entry
        about a member that could not take part in this round does not count.
        """
        entries = self.end.entries()
        before = self._before()
        lost = {entry.entry_rank for entry in entries if not entry.is_well}
        taken = 0
        if before is not None:
            lost &= before.all_members
            taken = before.taken
        well = {entry.entry_rank: entry.rank for entry in entries if entry.is_well and entry.entry_rank not in lost}
        world_size = max((entry.world_size for entry in entries if entry.is_well), default=0)
        if not world_size:  # no rank is well, so the size is known from the start alone
            world_size = max((entry.world_size for entry in [*self.start.entries(), *entries]), default=0)
        if not world_size or len(well) + len(lost) < world_size:
            return
        wishes = joining(self._store).entries()
        joined = {entry.entry_rank: entry.is_well for entry in wishes[taken:]}
        closed = Closed(
            world_size,
            ranges_of(set(range(world_size)) - set(well.values())),
            ranges_of(well),
            ranges_of(member for member, is_well in joined.items() if is_well and member not in well),
            len(wishes),
        )
        release(self._store, self.closed, write_record(closed))


def current(store: Store) -> int:
    """Returns the number of a round that all ranks have begun: the last one as a rule; 0 before the first. Does not
    wait. A number that is too low is harmless: the caller follows the `closed` keys from there."""
    if not store.check([_CURRENT]):
        return 0
    number = whole_number(store.get(_CURRENT), _MAX_ITERATIONS)
    if number is None:
        leave_out(_CURRENT)
    return number or 0


def tidy(store: Store, number: int) -> None:
    """Deletes what no rank needs any more. Called by one rank, once all ranks have begun round `number`.

    The previous round stays: ranks still read the reasons for its end. A round that was interrupted before all had
    begun it was never tidied up, so all rounds before are checked, back to one that has no such keys.
    """
    old = number - 2
    while old >= 0 and Round(store, old).has_keys():
        Round(store, old).delete_keys()
        old -= 1


def joining(store: Store) -> Arrivals:
    """Returns the requests of members to join. An entry with `is_well` false: the member does not want to any more."""
    return Arrivals(store, "joining")


def discarded(store: Store) -> Arrivals:
    """Returns the members to which the rank assignment gave no rank."""
    return Arrivals(store, "discarded")


def depart(
    store: Store, member: int, record: str, timeout_s: float, undecided: int = 0, number: int | None = None
) -> None:
    """Reports that a member is gone: interrupts the round, and accounts for the member at its end. Blocks until the
    round has ended on all other ranks.

    Called in a thread by the node agent or the standalone agent that saw the member's process end, or by the rank
    itself on its way out. A second report does no harm. A member that had entered the end of a round before it died may
    count as alive when that round closes, and be a member of the next round. `depart` then accounts for it in the next
    round, and so on from round to round until the member is out.

    Args:
        store: the keys of the call.
        member: the rank at entry of the call.
        record: why the member is gone, as `InterruptionRecord.to_json` writes it.
        timeout_s: how long the other ranks may take to arrive at a round's end.
        undecided: the number of members that may take part, where the member itself leaves before it got a rank;
            otherwise 0.
        number: of the first round in which the member may take part; None: the current one.

    Raises:
        RuntimeError: the store is lost, or the other ranks did not arrive in time.
    """
    if number is None:
        number = current(store)
    while True:
        this_round = Round(store, number)
        if not this_round.may_have(member):
            if this_round.closing() is None:
                return
            number += 1  # the member may have been let in since
            continue
        this_round.interrupt(record)
        if store.get(this_round.outcome) == DONE.encode():
            return
        this_round.account(Entry(member, world_size=undecided, is_well=False))
        store.wait([this_round.closed], datetime.timedelta(seconds=timeout_s))
        number += 1


def withdraw(store: Store, member: int, record: str, timeout_s: float) -> None:
    """Cancels the request of a dead member to join. If the member was just let in, reports its departure as `depart`
    does.

    Blocks until a round has closed that took the cancellation into account, or the call is done. Arguments are those of
    `depart`.
    """
    number = current(store)
    wishes = joining(store)
    wishes.sign(Entry(member, is_well=False))
    wish_count = len(wishes.entries())
    while True:
        closed = closing_of(store, number)
        if closed is None:
            return
        number += 1
        if member in closed.joined_members:
            depart(store, member, record, timeout_s, number=number)
        if closed.taken >= wish_count:
            return


def closing_of(store: Store, number: int) -> Closed | None:
    """Waits until a round ends, and returns how. None: the function is done on all ranks. Blocks without a limit."""
    this_round = Round(store, number)
    store.wait([this_round.outcome], EVER)
    if store.get(this_round.outcome) == DONE.encode():
        return None
    store.wait([this_round.closed], EVER)
    return Closed.read(store.get(this_round.closed))
