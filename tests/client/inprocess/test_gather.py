"""A value of every rank to every rank, over real stores; what is left there; who does not come."""

from __future__ import annotations

import datetime
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from ft_client.inprocess.exception import InternalError
from ft_client.inprocess.gather import gather, keys_left
from tests.client.inprocess.ranks import WAIT


def stores(kind: str, count: int, tmp_path: Path) -> list[Any]:
    """A store for each rank, all the same underneath."""
    if kind == "hash":
        return [HashStore()] * count
    if kind == "file":
        return [FileStore(str(tmp_path / "store"), count) for _ in range(count)]
    first = TCPStore("127.0.0.1", 0, None, True, WAIT, wait_for_workers=False)
    others = [TCPStore("127.0.0.1", first.port, None, False, WAIT, wait_for_workers=False) for _ in range(count - 1)]
    return [first, *others]


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_every_rank_gets_all_values_in_order(kind: str, tmp_path: Path) -> None:
    ranks, texts = [0, 2, 3, 7], {0: "", 2: "node-2", 3: "ä\n", 7: "x" * 5000}
    each = dict(zip(ranks, stores(kind, len(ranks), tmp_path), strict=True))
    with ThreadPoolExecutor(len(ranks)) as threads:
        for number in range(3):
            found = threads.map(
                lambda rank, number=number: gather(
                    PrefixStore("it", each[rank]), number, ranks, rank, texts[rank], WAIT
                ),
                ranks,
            )
            assert list(found) == [list(texts.values())] * len(ranks)


def test_what_is_left_in_the_store() -> None:
    store = HashStore()
    with ThreadPoolExecutor(5) as threads:
        for number in range(2):
            list(threads.map(lambda rank, number=number: gather(store, number, range(5), rank, "v", WAIT), range(5)))
    assert store.num_keys() == len(keys_left(2)) == 4
    for key in keys_left(2):
        store.delete_key(key)
    assert store.num_keys() == 0


def test_a_rank_that_does_not_come() -> None:
    with pytest.raises(RuntimeError, match="timeout"):
        gather(HashStore(), 0, [0, 1], 0, "v", datetime.timedelta(milliseconds=20))


def test_a_rank_too_many() -> None:
    store = HashStore()
    assert gather(store, 0, [0], 0, "v", WAIT) == ["v"]
    with pytest.raises(InternalError, match="2 ranks came, 1 were expected"):
        gather(store, 0, [0], 0, "v", WAIT)


@pytest.mark.parametrize(
    "published",
    [
        b"",
        zlib.compress(b"{"),
        zlib.compress(b"3"),
        *(zlib.compress(json.dumps(values).encode()) for values in (["a"], ["a", 1], {"a": 1, "b": 2})),
    ],
)
def test_what_none_of_us_published(published: bytes) -> None:
    store = HashStore()
    store.set(keys_left(1)[1], published)
    with pytest.raises(InternalError, match="what was published"):
        gather(store, 0, [0, 1], 0, "v", WAIT)
