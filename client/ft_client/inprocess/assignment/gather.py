"""Gathers one value of every rank on all ranks through a store: O(1) operations per rank.

Rank assignments use it by their context. Each rank writes its value and increments a counter; the last one reads
all values and publishes them, compressed, under one key. If a rank is lost meanwhile, a process that knows it publishes
that instead. The first publication holds for all ranks, and stays in the store with the counter: some kilobytes where
there are thousands of ranks. Each rank deletes its own value, unless the gather was abandoned.
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
    """A rank that takes part in the gather is lost."""


class Gathers:
    """The gathers that one rank makes through the store of one rank assignment. Another thread may abandon them."""

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
        # `abandon` sets the flag and then reads the number; here the order is reversed, so one of the two publishes.
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
        if published == _ABANDONED:  # the last one may still read the value of this rank: its key stays
            raise GatherAbandoned(f"gather {number}: a rank that takes part is lost")
        store.delete_key(mine)
        return _values(published, len(ranks), number)

    def abandon(self, store: Store) -> None:
        """Ends the present gather and all later ones on every rank with `GatherAbandoned`.

        Args:
            store: the same keys through another connection, since this rank's own may be waiting.
        """
        self._are_abandoned = True
        if self._made:
            release(store, _all(self._made - 1), _ABANDONED)


def _mine(number: int, rank: int) -> str:
    return f"{number}/{rank}"


def _all(number: int) -> str:
    return f"{number}/all"


def _values(published: bytes, count: int, number: int) -> list[str]:
    try:
        values = json.loads(zlib.decompress(published))
    except (zlib.error, ValueError) as problem:
        raise InternalError(f"gather {number}: the published values cannot be read: {problem}") from None
    if not isinstance(values, list) or len(values) != count or not all(isinstance(value, str) for value in values):
        raise InternalError(f"gather {number}: the published value is not a list of {count} texts")
    return values
