"""The store in a folder: what TCPStore does, at a size that does not grow, by several connections at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistStoreError

from ft_launcher.job.store.file_store import FolderStore


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store.d")


def test_it_does_what_tcpstore_does(store: FolderStore) -> None:
    store.set("a/text", "ä")
    store.multi_set(["a/text/below", "b"], [b"\xff\0", "b"])
    assert store.multi_get(["a/text/below", "a/text"]) == [b"\xff\0", "ä".encode()]
    assert [store.add("count", number) for number in (0, 2, 3)] == [0, 2, 5]
    assert store.compare_set("once", "", "first") == b"first"
    assert store.compare_set("once", "", "second") == b"first"
    assert store.compare_set("once", "first", "third") == b"third"
    assert store.compare_set("none", "some", "other") == b"some"
    assert store.check(["once", "b"]) and not store.check(["once", "none"])
    assert store.delete_key("once") and not store.delete_key("once")
    with pytest.raises(DistStoreError):
        store.wait(["none"], timedelta(seconds=0.05))


def test_everybody_who_adds_gets_a_number_of_their_own(store: FolderStore) -> None:
    stores = [store, *(FolderStore(store.folder) for _ in range(3))]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: [one.add("count", 1) for _ in range(50)], stores))
    assert sorted(number for part in found for number in part) == list(range(1, 201))


def test_a_wait_ends_when_the_key_is_written(store: FolderStore) -> None:
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(FolderStore(store.folder).get("key")))
    thread.start()
    store.set("key", "value")
    thread.join(60)
    assert found == [b"value"]


def test_it_does_not_grow(store: FolderStore) -> None:
    def size() -> int:
        return sum(file.stat().st_size for file in store.folder.iterdir())

    store.add("beat", 100)
    before = size()
    for _ in range(500):
        store.add("beat", 1)
    assert size() == before


def test_it_is_removed_only_as_long_as_nobody_else_uses_it(store: FolderStore) -> None:
    store.set("record", "mine")
    store.set("key", "value")
    store.remove_keys("k", "key2")
    assert not store.check(["key"]) and store.check(["record"])
    store.remove_job("record", b"another's", "")
    assert store.folder.is_dir()
    store.remove_job("record", b"mine", "")
    assert list(store.folder.parent.iterdir()) == []
    store.set("record", "the next job's")
    assert store.get("record") == b"the next job's"
