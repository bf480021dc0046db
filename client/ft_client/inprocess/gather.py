"""One value of every rank, handed to all of them through a store: O(1) operations per rank.

Each rank writes its value and counts itself; the last one reads them all and publishes them as one compressed value.
What a value means, its writer knows.
"""

from __future__ import annotations

import datetime
import json
import zlib
from collections.abc import Sequence
from typing import Protocol

from ft_client.inprocess.exception import InternalError


class GatherStore(Protocol):
    """The operations of `torch.distributed.Store` that a gather needs."""

    def set(self, key: str, value: str | bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def delete_key(self, key: str, /) -> bool: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta = ..., /) -> None: ...


def keys_left(gathers: int) -> list[str]:
    """The keys that so many gathers leave in their store; whoever made the store deletes them."""
    return [key for number in range(gathers) for key in (_arrived(number), _all(number))]


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
        RuntimeError: what the store raises when it is lost, or when others did not come in time.
        InternalError: more ranks came than were expected, or what was published is none of ours.
    """
    mine = f"{number}/{rank}"
    store.set(mine, value.encode())
    arrived = store.add(_arrived(number), 1)
    if arrived > len(ranks):
        raise InternalError(f"gather {number}: {arrived} ranks came, {len(ranks)} were expected")
    if arrived == len(ranks):
        values = [found.decode() for found in store.multi_get([f"{number}/{other}" for other in ranks])]
        store.set(_all(number), zlib.compress(json.dumps(values).encode(), 1))
    else:
        store.wait([_all(number)], *([] if timeout is None else [timeout]))
        values = _values(store.get(_all(number)), len(ranks), number)
    store.delete_key(mine)
    return values


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
