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

from ft_client.inprocess.assignment.gather import GatherAbandoned, Gathers
from ft_client.inprocess.exception import InternalError
from tests.client.inprocess.ranks import WAIT


def stores(kind: str, count: int, tmp_path: Path) -> list[Any]:
    """A store for each rank, all the same underneath."""
    if kind == "hash":
        return [HashStore()] * count
    if kind == "file":
        return [FileStore(str(tmp_path / "store"), count) for _ in range(count)]
    libuv = kind == "tcp"
    first = TCPStore("127.0.0.1", 0, None, True, WAIT, wait_for_workers=False, use_libuv=libuv)
    others = [TCPStore("127.0.0.1", first.port, None, False, WAIT, wait_for_workers=False) for _ in range(count - 1)]
    return [first, *others]


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "tcp without libuv"])
def test_every_rank_gets_all_values_in_order(kind: str, tmp_path: Path) -> None:
    ranks, texts = [0, 2, 3, 7], {0: "", 2: "node-2", 3: "ä\n", 7: "x" * 5000}
    each = {
        rank: Gathers(PrefixStore("it", store))
        for rank, store in zip(ranks, stores(kind, len(ranks), tmp_path), strict=True)
    }
    with ThreadPoolExecutor(len(ranks)) as threads:
        for _ in range(3):
            found = threads.map(lambda rank: each[rank].make(ranks, rank, texts[rank], WAIT), ranks)
            assert list(found) == [list(texts.values())] * len(ranks)


def test_what_is_left_in_the_store() -> None:
    store = HashStore()
    each = [Gathers(store) for _ in range(5)]
    with ThreadPoolExecutor(5) as threads:
        for _ in range(2):
            list(threads.map(lambda rank: each[rank].make(range(5), rank, "v", WAIT), range(5)))
    assert store.num_keys() == 2 * 2  # a counter and what was published, of each gather


def test_a_rank_that_does_not_come() -> None:
    with pytest.raises(RuntimeError, match="timeout"):
        Gathers(HashStore()).make([0, 1], 0, "v", datetime.timedelta(milliseconds=20))


def test_a_rank_too_many() -> None:
    store = HashStore()
    assert Gathers(store).make([0], 0, "v", WAIT) == ["v"]
    with pytest.raises(InternalError, match="2 ranks take part, 1 were expected"):
        Gathers(store).make([0], 0, "v", WAIT)


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
    store.set("0/all", published)
    with pytest.raises(InternalError, match="the published value"):
        Gathers(store).make([0, 1], 0, "v", WAIT)


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_whoever_waits_for_a_rank_that_is_gone_is_freed(kind: str, tmp_path: Path) -> None:
    one, two, watched = (PrefixStore("it", store) for store in stores(kind, 3, tmp_path))
    early, late = Gathers(one), Gathers(two)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(early.make, [0, 1, 2], 0, "v", WAIT)
        watched.wait(["0/0"], WAIT)
        early.abandon(watched)
        with pytest.raises(GatherAbandoned):
            waits.result(60)
    with pytest.raises(GatherAbandoned):
        late.make([0, 1, 2], 1, "v", WAIT)


def test_what_is_abandoned_before_it_begins_does_not_wait() -> None:
    store = HashStore()
    gathers = Gathers(store)
    gathers.abandon(store)
    with pytest.raises(GatherAbandoned):
        gathers.make([0, 1], 0, "v", WAIT)


def test_a_gather_that_all_came_to_holds_for_all_whoever_abandons_it_later() -> None:
    store = HashStore()
    first, second = Gathers(store), Gathers(store)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(first.make, [0, 1], 0, "a", WAIT)
        assert second.make([0, 1], 1, "b", WAIT) == ["a", "b"]
        second.abandon(store)
        assert waits.result(60) == ["a", "b"]
