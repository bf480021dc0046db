"""The arrivals at a barrier: a list of entries in a store, and a counter, so that an arrival costs two operations.

The one that finds that all are counted reads the entries, once. A member may have two entries: its own, and after its
death one by the agent or companion that speaks for it. So members count, not entries.
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
"""Ten years: without an argument a wait ends after the store's own timeout, by default 300 s."""

MAX_MEMBERS = 1 << 20
"""Ten times the ranks of the largest jobs. A greater number in the store was not written by a rank of ours."""

_NO_VALUE = "\0no value"
"""A text that nobody writes under a key of ours: `value_now` expects it."""

_MAX_SIGNATURES = 8
"""Entries of one member at one barrier. Two are usual where it died; each further report of its end adds one."""


class Store(Protocol):
    """The operations of `torch.distributed.Store` that in-process restart uses."""

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
    """Writes a key that others wait for, unless it has a value. Returns the value that it has then.

    torch's `TCPStore` server without libuv (`USE_LIBUV=0`, and ours with torch 2.6 and 2.7) wakes nobody at a
    `compare_set`, as seen with torch 2.6 and 2.13. It does at an `append`, also of nothing.
    """
    found = store.compare_set(key, "", value)
    store.append(key, "")
    return found


def value_now(store: Store, key: str) -> bytes | None:
    """Returns the value of a key, or None where it has none. Never waits.

    For every key that another process may delete. A `get` after a `check` is two operations, and waits for the store's
    whole timeout (60 s, or 300) where the key is deleted between them: in a storm of restarts an agent stood still for
    a minute. A `compare_set` of a value that differs from the expected one is a read in one operation; in place of a
    key that is missing, each of torch's stores returns what was expected.

    Not for a key that somebody waits for: the libuv server of torch 2.13 wakes those at a `compare_set` of a missing
    key, and they read an empty value.
    """
    found = bytes(store.compare_set(key, _NO_VALUE, _NO_VALUE))
    if found == _NO_VALUE.encode():
        return None
    return found


@dataclass(frozen=True)
class Entry:
    """A member (a rank by its number at entry) with its rank in the round of `world_size` ranks.

    An entry with `is_well` false is written by the process that speaks for a lost member. Its rank is 0, being unknown
    there, and so is its size, unless the member itself writes it before it has a rank.
    """

    member: int
    rank: int = 0
    world_size: int = 0
    is_well: bool = True


class Arrivals:
    """The arrivals at one barrier, under `key`."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._entries, self._count = store, f"{key}/entries", f"{key}/count"

    def sign(self, entry: Entry) -> int:
        """Adds an entry. Returns how many were counted, this one included."""
        # First the entry, then the counter: a member that is counted can be read, also if it dies in between.
        self._store.append(self._entries, f"{entry.member} {entry.rank} {entry.world_size} {int(entry.is_well)}\n")
        return self._store.add(self._count, 1)

    def complete(self, entry: Entry, size: int) -> bool:
        """Adds an entry. Returns whether `size` or more have been counted.

        A member may have several entries: its own, and those of the process that speaks for it. A counter far above
        that was not written by a rank; then the members are counted in the entries.
        """
        counted = self.sign(entry)
        if 0 < counted <= _MAX_SIGNATURES * size:
            return counted >= size
        leave_out(self._count)
        return len({entry.member for entry in self.entries()}) >= size

    def entries(self) -> list[Entry]:
        """All entries, in the order of their arrival. Invalid lines are left out, with a warning."""
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
        """The keys that it uses in the store."""
        return [self._entries, self._count]


@functools.lru_cache(maxsize=256)
def leave_out(key: str) -> None:
    """Logs, once for each key, that it holds what no rank wrote."""
    logger.warning("the ranks' store holds what no rank wrote, under %r: it is left out", key)


def ranges_of(ranks: Iterable[int]) -> str:
    """Numbers as ranges: `0-3,5`."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in found)


def ranks_in(ranges: str) -> set[int]:
    """The numbers of `ranges_of`.

    Raises:
        ValueError: it is no such text, or has numbers that no rank has.
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
