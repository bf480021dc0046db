"""The stores and their barriers, on real servers and files."""

from __future__ import annotations

import datetime
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ft_client.inprocess.store import BarrierOverflow, BarrierTimeout, FileStore, PrefixStore, TCPStore, address
from rank_monitor.contract.rounds.barrier import Arrivals, Entry, ranges_of, ranks_in, release
from rank_monitor.contract.rounds.round import DONE, Closed, Round, depart, tidy
from tests.ports import free_port

WAIT = datetime.timedelta(seconds=60)
SOON = datetime.timedelta(milliseconds=50)


@pytest.fixture(params=["tcp", "tcp without libuv", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TCPStore | FileStore:
    if request.param == "file":
        return FileStore(str(tmp_path / "store"), -1)
    return _server(libuv=request.param == "tcp")


def _server(libuv: bool = True) -> TCPStore:
    return TCPStore("127.0.0.1", free_port(), 1, is_master=True, use_libuv=libuv)


def test_a_release_wakes_who_waits(store: TCPStore | FileStore) -> None:
    """A release that finds the key written wakes the waiters too: its writer may have died before it could."""
    own = TCPStore("127.0.0.1", store.port, 1) if isinstance(store, TCPStore) else store
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(own.wait, ["key"], WAIT)
        store.compare_set("key", "", "first")
        assert release(store, "key", "second") == b"first" == store.get("key")
        waiting.result(WAIT.total_seconds())


def test_a_barrier_lets_all_through_at_once(store: TCPStore | FileStore) -> None:
    passed: list[int] = []

    def come(rank: int) -> None:
        own = TCPStore("127.0.0.1", store.port, 1) if isinstance(store, TCPStore) else store  # a wait blocks its own
        own.barrier(rank, "one", 3, WAIT)
        passed.append(rank)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    assert passed == []
    store.barrier(2, "one", 3, WAIT)
    for thread in threads:
        thread.join(60)
    assert sorted(passed) == [0, 1]


def test_a_barrier_says_who_came(store: TCPStore | FileStore) -> None:
    with pytest.raises(BarrierTimeout, match=r"after 0.05 s only ranks \[4\] of 2 have come"):
        store.barrier(4, "late", 2, SOON)


def test_one_too_many(store: TCPStore | FileStore) -> None:
    store.barrier(0, "single", 1, WAIT)
    with pytest.raises(BarrierOverflow, match="2 ranks came, 1 were expected"):
        store.barrier(1, "single", 1, WAIT)


def test_an_iteration_over_a_real_store(store: TCPStore | FileStore) -> None:
    kept = PrefixStore("call/0", store)
    iteration = Round(kept, 0)
    iteration.offer("nowhere")
    iteration.offer("here")
    for rank in range(3):
        iteration.arrive(Entry(rank, rank, 3))
    assert kept.get(iteration.started) == b"gohere"
    iteration.interrupt('{"rank": 1, "interruption": "EXCEPTION"}')
    iteration.account(Entry(0, 0, 3))
    iteration.account(Entry(2, 2, 3))
    assert iteration.closing() is None
    iteration.account(Entry(1, is_well=False))
    assert iteration.closing() == Closed(3, "1", "0,2", "", 0)
    assert iteration.records() == ['{"rank": 1, "interruption": "EXCEPTION"}']
    second = Round(kept, 1)
    second.offer("")
    second.arrive(Entry(0, 0, 2))
    second.arrive(Entry(2, 1, 2))
    second.announce_return(Entry(0, 0, 2), 2)
    second.announce_return(Entry(2, 1, 2), 2)
    assert kept.get(second.outcome) == DONE.encode()


def test_a_fault_after_all_returned_changes_nothing(store: TCPStore | FileStore) -> None:
    iteration = Round(store, 0)
    iteration.offer("")
    iteration.arrive(Entry(0, 0, 1))
    iteration.announce_return(Entry(0, 0, 1), 1)
    iteration.interrupt("{}")
    assert store.get(iteration.outcome) == DONE.encode()


def test_what_is_old_is_deleted_and_what_may_be_read_is_not(store: TCPStore | FileStore) -> None:
    for number in range(3):
        iteration = Round(store, number)
        iteration.offer("")
        iteration.arrive(Entry(0, 0, 1))
        iteration.interrupt("{}")
        iteration.account(Entry(0, 0, 1))
    tidy(store, 3)
    assert not store.check(["1/start/entries"]) and not Round(store, 1).records()
    assert Round(store, 2).records() == ["{}"]


def test_what_is_left_of_iterations_that_were_interrupted_before_they_began(store: TCPStore | FileStore) -> None:
    """Nobody began them, so nobody deleted anything then."""
    for number in range(6):
        iteration = Round(store, number)
        if number % 3 == 0:
            iteration.offer("")
            iteration.arrive(Entry(0, 0, 1))
            tidy(store, number)
        iteration.interrupt("{}")
        iteration.account(Entry(0, 0, 1))
    tidy(store, 6)
    for number in range(5):
        assert not any(store.check([f"{number}/end/{name}"]) for name in ("entries", "count")), number
        assert not Round(store, number).records(), number
    assert Round(store, 5).records() == ["{}"]


def test_who_was_stopped_in_an_old_iteration_learns_that_the_others_went_on(store: TCPStore | FileStore) -> None:
    """Nothing that it does there releases anything anew, and nothing that it awaits is missing."""
    old = Round(store, 0)
    old.offer("")
    for member in range(2):
        old.arrive(Entry(member, member, 2))
    old.interrupt("{}")
    old.account(Entry(0, 0, 2))
    old.account(Entry(1, is_well=False))
    tidy(store, 2)
    old.arrive(Entry(1, 1, 2))
    old.announce_return(Entry(1, 1, 2), 1)
    old.account(Entry(1, 1, 2))
    store.wait([old.started, old.outcome, old.closed], SOON)
    assert old.closing() == Closed(2, "1", "0", "", 0)
    depart(store, 1, "{}", SOON.total_seconds())


def test_nobody_is_missing_in_an_iteration_that_has_closed(store: TCPStore | FileStore) -> None:
    """Who was stopped while it waited there for the others finds what they signed deleted."""
    old = Round(store, 0)
    old.offer("")
    for member in range(3):
        old.arrive(Entry(member, member, 3))
    old.interrupt("{}")
    for member in range(2):
        old.account(Entry(member, member, 3))
    assert old.missing(old.end, 3) == [2]
    old.account(Entry(2, is_well=False))
    assert old.missing(old.start, 3) == []
    tidy(store, 2)
    assert old.missing(old.start, 3) == old.missing(old.end, 3) == []


def test_rolls_and_ranges() -> None:
    assert ranges_of([]) == ""
    assert ranges_of([5, 0, 1, 2]) == "0-2,5"
    assert ranks_in("0-2,5") == {0, 1, 2, 5}
    assert ranks_in("") == set()
    roll = Arrivals(_server(), "barrier")
    assert roll.entries() == []
    assert roll.sign(Entry(7, 1, 4)) == 1
    assert roll.sign(Entry(8, is_well=False)) == 2
    assert roll.entries() == [Entry(7, 1, 4), Entry(8, 0, 0, False)]


@pytest.mark.parametrize(
    ("host", "port", "env", "found"),
    [
        ("h", 5, {}, ("h", 5)),
        (None, None, {"MASTER_ADDR": "m", "MASTER_PORT": "7"}, ("m", 7)),
        ("h", None, {"MASTER_PORT": "7"}, ("h", 7)),
    ],
)
def test_where_a_store_is(
    monkeypatch: pytest.MonkeyPatch, host: str | None, port: int | None, env: dict[str, str], found: tuple[str, int]
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert address(host, port) == found


@pytest.mark.parametrize("port", ["", "x", "0", "70000"])
def test_no_address(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", "m")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT"):
        address(None, None)
