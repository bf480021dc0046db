"""The arrivals at a barrier of an in-process restart, and the operations on the ranks' store that all of it rests on.

`round.py` makes its barriers of `Arrivals`: a list of entries in the store, and a counter. An arrival costs two
operations, however many ranks there are; the one that finds that all are counted reads the entries, once.

A *member* is a rank by its number at entry of the call, which it keeps for the whole call. A member may have two
entries: its own, and after its death one by the agent that speaks for it. So members count, not entries.

Two rules hold for every key, and each was learned from a rank or an agent that stood still (see the functions): a key
that somebody waits for is written by `release`, once; a key that somebody may delete is read by `value_now`.
"""

from __future__ import annotations

import datetime
import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from rank_monitor.contract.wire.foreign import whole_number

logger = logging.getLogger(__name__)

EVER = datetime.timedelta(days=3650)
"""Ten years, for waits without a limit: without an argument a wait ends after the store's own timeout, by default
300 s."""

MAX_MEMBERS = 1 << 20
"""Ten times the ranks of the largest jobs. A greater number in the store was not written by a rank of ours."""

_NO_VALUE = "\0no value"
"""A text that nobody writes under a key of ours: the value that `value_now` expects."""

_MAX_SIGNATURES = 8
"""Entries of one member at one barrier. Two are usual where the member died, and each further report of its end adds
one."""


class Store(Protocol):
    """The operations of `torch.distributed.Store` that in-process restart uses. Any store of torch's has them."""

    def set(self, key: str, value: str | bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def append(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str | bytes, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def delete_key(self, key: str, /) -> bool: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta = ..., /) -> None: ...


def release(store: Store, key: str, value: str | bytes) -> bytes:
    """Writes a key that others wait for, unless the key has a value. Returns the value that the key has then.

    Where two processes write at once, the first wins, and both learn the same value.

    torch's `TCPStore` server without libuv (`USE_LIBUV=0`, and our servers with torch 2.6 and 2.7) wakes nobody at a
    `compare_set`, as seen with torch 2.6 and 2.13. At an `append` it wakes those who wait, also at one of nothing.
    """
    found = store.compare_set(key, "", value)
    store.append(key, "")
    return found


def value_now(store: Store, key: str) -> bytes | None:
    """Returns the value of a key, or None where it has none. Never waits.

    For every key that another process may delete. A `get` after a `check` is two operations, and waits for the store's
    whole timeout (60 s, or 300 s) where the key is deleted between the two: in a storm of restarts an agent stood still
    for a minute. A `compare_set` whose expected value nobody has written is a read in one operation; for a key that is
    missing, each of torch's stores returns the expected value.

    Not for a key that somebody waits for: the libuv server of torch 2.13 wakes the waiting processes at a `compare_set`
    of a missing key, and they read an empty value.
    """
    found = bytes(store.compare_set(key, _NO_VALUE, _NO_VALUE))
    if found == _NO_VALUE.encode():
        return None
    return found


@dataclass(frozen=True)
class Entry:
    """One arrival: a member with its rank in the round.

    Attributes:
        entry_rank: which member: the rank's number at entry of the call.
        rank: the rank in this round; 0 where the writer does not know it.
        world_size: the ranks of this round; 0 where the writer does not know it.
        is_well: False: the member is lost, or leaves. The process that speaks for the member writes such an entry, or
            the member itself on its way out.
    """

    entry_rank: int
    rank: int = 0
    world_size: int = 0
    is_well: bool = True


class Arrivals:
    """The arrivals at one barrier, under `key`."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._entries, self._count = store, f"{key}/entries", f"{key}/count"

    def sign(self, entry: Entry) -> int:
        """Adds an entry. Returns how many entries were counted, this one included. Two operations; does not wait."""
        # First the entry, then the counter: the entry of a member that is counted can be read, wherever it dies.
        self._store.append(self._entries, f"{entry.entry_rank} {entry.rank} {entry.world_size} {int(entry.is_well)}\n")
        return self._store.add(self._count, 1)

    def complete(self, entry: Entry, size: int) -> bool:
        """Adds an entry. Returns whether `size` entries or more have been counted.

        A counter far above `size` was not written by ranks of ours: a member has few entries (`_MAX_SIGNATURES`). Then
        the members are counted in the entries instead.
        """
        counted = self.sign(entry)
        if 0 < counted <= _MAX_SIGNATURES * size:
            return counted >= size
        leave_out(self._count)
        return len({entry.entry_rank for entry in self.entries()}) >= size

    def entries(self) -> list[Entry]:
        """Returns all entries, in the order of their arrival. Invalid lines are left out, with a warning."""
        found = []
        for line in (value_now(self._store, self._entries) or b"").splitlines():
            numbers = [whole_number(field, MAX_MEMBERS) for field in line.split()]
            match numbers:
                case [int(member), int(rank), int(world_size), 0 | 1 as is_well]:
                    found.append(Entry(member, rank, world_size, bool(is_well)))
                case _:
                    leave_out(self._entries)
        return found

    def keys(self) -> list[str]:
        """Returns the keys in the store that this barrier uses."""
        return [self._entries, self._count]


@functools.lru_cache(maxsize=256)
def leave_out(key: str) -> None:
    """Logs, once for each key, that the key holds what no rank of ours wrote. The caller goes on without it."""
    logger.warning("the ranks' store holds what no rank wrote, under %r: it is left out", key)


def ranges_of(ranks: Iterable[int]) -> str:
    """Returns numbers as text of ranges, `0-3,5`: a record of 100,000 ranks stays short."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in found)


def ranks_in(ranges: str) -> set[int]:
    """Returns the numbers in a text of `ranges_of`.

    Raises:
        ValueError: the text is no such text, or has numbers that no rank has.
    """
    found: set[int] = set()
    if not ranges:
        return found
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or numbers[0] < 0 or numbers[-1] >= MAX_MEMBERS:
            raise ValueError(f"no ranks: {part[:100]!r}")
        found.update(numbers)
    return found
