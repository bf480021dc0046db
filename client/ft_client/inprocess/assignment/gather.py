"""Gathers one value of every rank on all ranks through a store: O(1) operations per rank.

Each rank writes its value and counts itself; the last one reads them all and publishes them as one compressed value.
When a rank is gone that should come, whoever knows publishes that instead: whichever is first holds for all. What a
value means, its writer knows.
"""

from __future__ import annotations

import datetime
import json
import zlib
from collections.abc import Sequence
from typing import Protocol

from ft_client.inprocess.exception import InternalError
from rank_monitor.contract.iterations.barrier import release


class GatherStore(Protocol):
    """The operations of `torch.distributed.Store` that a gather needs."""

    def set(self, key: str, value: str | bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def append(self, key: str, value: str, /) -> None: ...
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def delete_key(self, key: str, /) -> bool: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta = ..., /) -> None: ...


_ABANDONED = b"abandoned"


class GatherAbandoned(Exception):
    """A rank that takes part in the gather is lost."""


class Gathers:
    """Those that one rank makes through the store of one rank assignment. Another thread may abandon them.

    `left_here`: keys that this rank is to delete once all are past them.
    """

    def __init__(self, store: GatherStore) -> None:
        self._store = store
        self._made = 0
        self.left_here: list[str] = []
        self._are_abandoned = False

    def make(self, ranks: Sequence[int], rank: int, value: str, timeout: datetime.timedelta | None) -> list[str]:
        """The next one: see `gather`.

        Raises:
            GatherAbandoned: see `gather`.
        """
        self._made += 1
        self.left_here = [_mine(self._made - 1, rank)]
        if self._are_abandoned:  # set before the number is read there, as it is read here after the number
            _publish(self._store, self._made - 1, _ABANDONED)
        values = gather(self._store, self._made - 1, ranks, rank, value, timeout)
        self.left_here = []
        return values

    def abandon(self, store: GatherStore) -> None:
        """Frees the rank, and all others, from the gather it is in, and from those to come.

        Args:
            store: the same keys, through another connection.
        """
        self._are_abandoned = True
        if self._made:
            _publish(store, self._made - 1, _ABANDONED)

    def keys_left(self) -> list[str]:
        """What they leave in their store beside that, to be deleted by one rank."""
        return [key for number in range(self._made) for key in (_arrived(number), _all(number))]


def gather(
    store: GatherStore, number: int, ranks: Sequence[int], rank: int, value: str, timeout: datetime.timedelta | None
) -> list[str]:
    """The values of `ranks`, in their order; each of them makes this call.

    Args:
        store: seen by all of them.
        number: tells this gather from others through the same store; the same on every rank.
        ranks: the same on every rank.
        rank: this one, of `ranks`.
        value: of this rank.
        timeout: for the others; None: the store's own.

    Raises:
        GatherAbandoned: a rank is gone that should have come; raised on all of them.
        RuntimeError: what the store raises when it is lost, or when others did not come in time.
        InternalError: more ranks came than were expected, or what was published is none of ours.
    """
    mine = _mine(number, rank)
    store.set(mine, value.encode())
    arrived = store.add(_arrived(number), 1)
    if arrived > len(ranks):
        raise InternalError(f"gather {number}: {arrived} ranks came, {len(ranks)} were expected")
    if arrived == len(ranks):
        values = [found.decode() for found in store.multi_get([_mine(number, other) for other in ranks])]
        published = _publish(store, number, zlib.compress(json.dumps(values).encode(), 1))
    else:
        if timeout is None:
            store.wait([_all(number)])
        else:
            store.wait([_all(number)], timeout)
        published = store.get(_all(number))
    if published == _ABANDONED:  # the last one to come may still read the value of this rank
        raise GatherAbandoned(f"gather {number}: a rank that should have come is gone")
    store.delete_key(mine)
    return _values(published, len(ranks), number)


def _publish(store: GatherStore, number: int, value: bytes) -> bytes:
    """Publishes a value unless there is one; what is published then."""
    return release(store, _all(number), value)


def _mine(number: int, rank: int) -> str:
    return f"{number}/{rank}"


def _arrived(number: int) -> str:
    return f"{number}/arrived"


def _all(number: int) -> str:
    return f"{number}/all"


def _values(published: bytes, count: int, number: int) -> list[str]:
    try:
        values = json.loads(zlib.decompress(published))
    except (zlib.error, ValueError) as problem:
        raise InternalError(f"gather {number}: what was published cannot be read: {problem}") from None
    if not isinstance(values, list) or len(values) != count or not all(isinstance(value, str) for value in values):
        raise InternalError(f"gather {number}: what was published is no list of {count} values")
    return values
