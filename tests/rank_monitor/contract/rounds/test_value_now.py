"""Reads of keys that others delete: they never wait, in any of torch's stores, at whatever moment a key goes."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from rank_monitor.contract.rounds.barrier import Entry, Store, release, value_now
from rank_monitor.contract.rounds.round import Round, current, tidy
from tests.patience import patient

AN_HOUR = datetime.timedelta(hours=1)
RECORD = '{"rank": 0, "interruption": "EXCEPTION"}'


def tcp(path: Path, use_libuv: bool) -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=AN_HOUR, use_libuv=use_libuv)


STORES: dict[str, Callable[[Path], Any]] = {
    "tcp": lambda path: tcp(path, use_libuv=True),
    "tcp without libuv": lambda path: tcp(path, use_libuv=False),
    "hash": lambda path: HashStore(),
    "file": lambda path: FileStore(str(path / "store"), 1),
}


@pytest.mark.parametrize("kind", STORES)
def test_a_value_or_none(kind: str, tmp_path: Path) -> None:
    raw = STORES[kind](tmp_path)
    raw.set_timeout(AN_HOUR)
    store = PrefixStore("call/0", raw)
    assert value_now(store, "key") is None
    assert not store.check(["key"])
    store.set("key", "bad sample")
    assert value_now(store, "key") == b"bad sample"
    store.append("entries", "0 0 1 1\n")
    store.append("entries", "1 1 1 1\n")
    assert value_now(store, "entries") == b"0 0 1 1\n1 1 1 1\n"
    store.set("empty", "")
    assert value_now(store, "empty") == b""
    store.delete_key("key")
    assert value_now(store, "key") is None


RELEASED = ("started", "outcome", "closed", "round", "store")
"""The last parts of keys that nobody deletes."""


class Deleting:
    """A store in which another process deletes each key that it may, after any operation of this one."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        def called(key: Any, *others: Any) -> Any:
            found = getattr(self._store, name)(key, *others)
            for one in key if isinstance(key, list) else [key]:
                if not one.endswith(RELEASED):
                    self._store.delete_key(one)
            return found

        return called


def fault(store: Store) -> Round:
    """Round 0 after a fault of its only rank."""
    iteration = Round(store, 0)
    iteration.offer("address")
    iteration.arrive(Entry(0, 0, 1))
    iteration.set_culprit('{"ranks": [0]}')
    iteration.interrupt(RECORD)
    iteration.account(Entry(0, 0, 1))
    return iteration


READS: dict[str, Callable[[Any, Round], object]] = {
    "records": lambda store, iteration: iteration.records(),
    "culprit": lambda store, iteration: iteration.culprit(),
    "closing": lambda store, iteration: iteration.closing(),
    "arrivals": lambda store, iteration: iteration.end.entries(),
    "missing": lambda store, iteration: iteration.missing(iteration.start, 2),
    "may_have": lambda store, iteration: iteration.may_have(0),
    "current": lambda store, iteration: current(store),
    "tidy": lambda store, iteration: tidy(store, 2),
}


@pytest.mark.parametrize("is_there", [True, False], ids=["deleted meanwhile", "deleted before"])
@pytest.mark.parametrize("read", READS)
def test_no_read_waits_for_a_key_that_is_gone(read: str, is_there: bool) -> None:
    raw = tcp(Path(), use_libuv=True)
    store: Any = PrefixStore("call/0", raw)
    if is_there:
        fault(store)
        store = Deleting(store)
    ended = threading.Event()

    def reads() -> None:
        READS[read](store, Round(store, 0))
        ended.set()

    threading.Thread(target=reads, daemon=True).start()
    assert ended.wait(patient(10)), f"{read} waits"


@pytest.mark.parametrize("use_libuv", [True, False])
@pytest.mark.parametrize("read", READS)
def test_no_read_wakes_who_waits_for_what_is_not_there_yet(read: str, use_libuv: bool) -> None:
    """The server with libuv wakes those who wait for a key that another compares and sets."""
    raw = tcp(Path(), use_libuv)
    woken: list[str] = []

    def waits(key: str, client: TCPStore) -> None:
        PrefixStore("call/0", client).wait([key], AN_HOUR)
        woken.append(key)

    keys = [f"0/{name}" for name in ("started", "outcome", "closed", "store")]
    threads = []
    for key in keys:
        client = TCPStore("127.0.0.1", raw.port, is_master=False, wait_for_workers=False, use_libuv=use_libuv)
        threads.append(threading.Thread(target=waits, args=(key, client), daemon=True))
        threads[-1].start()
    store: Any = PrefixStore("call/0", raw)
    for _ in range(200):
        READS[read](store, Round(store, 0))
    assert woken == []
    for key in keys:
        release(store, key, "value")
    for thread in threads:
        thread.join(patient(10))
    assert sorted(woken) == sorted(keys)


def test_the_last_rank_at_a_start_finds_the_store_address_when_the_others_have_gone_on() -> None:
    """It was stopped for long, between its arrival and the store address: it must not wait for a deleted key."""
    store: Any = PrefixStore("call/0", tcp(Path(), use_libuv=True))
    fault(store)
    tidy(store, 2)
    assert value_now(store, "0/store") == b"address"
    assert value_now(store, "0/records/1") is None
