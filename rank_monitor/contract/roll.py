"""Who came to a barrier: a list of entries in a store, and a counter, so that coming costs two operations.

Whoever finds that all are counted reads the entries, once. A member may have two entries, when it signed and died and
somebody spoke for it; so what counts is members, not entries.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol


class Store(Protocol):
    """The operations of `torch.distributed.Store` that in-process restart uses."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def append(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None: ...


class ReleasingStore(Protocol):
    """What `release` needs of a store."""

    def append(self, key: str, value: str, /) -> None: ...
    def compare_set(self, key: str, expected: str, desired: Any, /) -> bytes: ...


def release(store: ReleasingStore, key: str, value: str | bytes) -> bytes:
    """Writes a key that others wait for, unless it is written; returns what it holds then.

    torch's `TCPStore` server without libuv (`USE_LIBUV=0`, and ours with torch 2.6 and 2.7) wakes nobody at a
    `compare_set`, as seen with torch 2.6 and 2.13. It does at an `append`, also of nothing.
    """
    found = store.compare_set(key, "", value)
    store.append(key, "")
    return found


@dataclass(frozen=True)
class Entry:
    """A member (a rank by its number at entry) with its rank in the iteration of `world_size` ranks.

    One that is not well was entered by whoever speaks for it; its rank is 0, being unknown there, and so is its size,
    unless it speaks for itself before it has a rank.
    """

    member: int
    rank: int = 0
    world_size: int = 0
    is_well: bool = True


class Roll:
    """The roll of one barrier, under `key`."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._entries, self._count = store, f"{key}/entries", f"{key}/count"

    def sign(self, entry: Entry) -> int:
        """Adds an entry; returns how many were counted, this one included."""
        self._store.append(self._entries, f"{entry.member} {entry.rank} {entry.world_size} {int(entry.is_well)}\n")
        return self._store.add(self._count, 1)

    def entries(self) -> list[Entry]:
        """Every entry, in the order they came."""
        if not self._store.check([self._entries]):
            return []
        lines = self._store.get(self._entries).decode().splitlines()
        numbers = (tuple(map(int, line.split())) for line in lines)
        return [Entry(member, rank, world_size, bool(is_well)) for member, rank, world_size, is_well in numbers]

    def keys(self) -> list[str]:
        """What it leaves in the store."""
        return [self._entries, self._count]


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
        ValueError: it is no such text.
    """
    found: set[int] = set()
    for part in ranges.split(",") if ranges else []:
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
