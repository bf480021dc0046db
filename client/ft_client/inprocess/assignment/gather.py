"""Gathers one value of every rank on all ranks through a store, with O(1) operations per rank.

Rank assignments use it, by the `gathers` of their context. How a gather goes:

1. Each rank writes its value and increments a counter.
2. The last rank reads all values and publishes them, compressed, under one key. All other ranks wait for that key.
3. If a rank is lost meanwhile, a process that knows it publishes that the gather is abandoned.
4. The first publication holds for all ranks, so that all return values, or all raise `GatherAbandoned`.

The publication stays in the store, with the counter: some kilobytes where there are thousands of ranks. Each rank
deletes its own value, unless the gather was abandoned.

Threads: the main thread gathers, and may block in it. The watcher's thread abandons, over another connection.
"""

from __future__ import annotations

import datetime
import json
import zlib
from collections.abc import Sequence

from ft_client.inprocess.exception import InternalError
from rank_monitor.contract.rounds.barrier import Store, release

_ABANDONED = b"abandoned"


class GatherAbandoned(Exception):
    """A rank that takes part in the gather is lost. Raised on all other ranks that take part."""


class Gathers:
    """The gathers that one rank makes through the store of one rank assignment. Another thread may abandon them.

    Gathers are numbered: every rank must make the same gathers in the same order.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._made = 0
        self._are_abandoned = False

    def make(self, ranks: Sequence[int], rank: int, value: str, timeout: datetime.timedelta | None) -> list[str]:
        """Returns the values of `ranks`, in their order. Collective over these ranks; blocks until all have called it.

        Args:
            ranks: the same sequence on every rank.
            rank: this rank, one of `ranks`.
            value: the value of this rank.
            timeout: how long to wait for the others; None: the store's own timeout.

        Raises:
            GatherAbandoned: one of the ranks is lost; raised on all others.
            RuntimeError: raised by the store when it is lost, or when a rank did not call in time.
            InternalError: more ranks called than `ranks` has, or the published value is invalid.
        """
        store, number = self._store, self._made
        mine, everything = _mine(number, rank), _all(number)
        self._made += 1
        # `abandon` sets the flag, then reads the number. Here the number is set first, then the flag is read: so at
        # least one of the two threads sees what the other has set, and publishes.
        if self._are_abandoned:
            release(store, everything, _ABANDONED)
        store.set(mine, value.encode())
        arrived = store.add(f"{number}/arrived", 1)
        if arrived > len(ranks):
            raise InternalError(f"gather {number}: {arrived} ranks take part, {len(ranks)} were expected")
        if arrived == len(ranks):
            values = [found.decode() for found in store.multi_get([_mine(number, other) for other in ranks])]
            published = release(store, everything, zlib.compress(json.dumps(values).encode(), 1))
        else:
            if timeout is None:
                store.wait([everything])
            else:
                store.wait([everything], timeout)
            published = store.get(everything)
        if published == _ABANDONED:  # the last rank may still read the value of this rank, so its key stays
            raise GatherAbandoned(f"gather {number}: a rank that takes part is lost")
        store.delete_key(mine)
        return _values(published, len(ranks), number)

    def abandon(self, store: Store) -> None:
        """Ends the present gather and all later gathers, on every rank, with `GatherAbandoned`. Does not wait.

        Args:
            store: the same keys through another connection, since the connection of the main thread may be waiting.
        """
        self._are_abandoned = True
        if self._made:
            release(store, _all(self._made - 1), _ABANDONED)


def _mine(number: int, rank: int) -> str:
    return f"{number}/{rank}"


def _all(number: int) -> str:
    return f"{number}/all"


def _values(published: bytes, count: int, number: int) -> list[str]:
    """Returns the values of a publication.

    Raises:
        InternalError: the publication is not one of `count` ranks. Any process can write to the store.
    """
    try:
        values = json.loads(zlib.decompress(published))
    except (zlib.error, ValueError) as problem:
        raise InternalError(f"gather {number}: the published values cannot be read: {problem}") from None
    if not isinstance(values, list) or len(values) != count or not all(isinstance(value, str) for value in values):
        raise InternalError(f"gather {number}: the published value is not a list of {count} texts")
    return values
