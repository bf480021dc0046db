"""Hosting the stores of rounds: the next store is made one round ahead, no other is kept, and an error is reported."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from rank_monitor.contract.rounds.barrier import Entry
from rank_monitor.contract.rounds.round import Round
from rank_monitor.contract.rounds.round_stores import serve_rounds, store_address_of, variables_of
from tests.patience import patient, until

ALONE = Entry(0, 0, 1)
_MOST = 5
HOST = "10.0.0.1"
LIMIT_S = patient(60)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def serving(store: HashStore) -> Iterator[Callable[..., threading.Thread]]:
    """Starts a host with its servers, and how it makes them. It ends with the test."""
    threads: list[threading.Thread] = []

    def start(servers: dict[int, object], serve: Callable[[], tuple[object, int]]) -> threading.Thread:
        threads.append(threading.Thread(target=serve_rounds, args=(store, serve, HOST, servers), daemon=True))
        threads[-1].start()
        return threads[-1]

    yield start
    for number in range(_MOST):
        Round(store, number).interrupt("{}")
    Round(store, _MOST).offer("")
    Round(store, _MOST).arrive(ALONE)
    Round(store, _MOST).announce_return(ALONE, 1)
    for thread in threads:
        thread.join(60)


def numbered() -> Callable[[], tuple[object, int]]:
    ports = iter(range(1001, 2000))
    return lambda: (object(), next(ports))


def started_with(store: HashStore, number: int) -> dict[str, str]:
    """What the ranks are told of the store of a round, all of them being there."""
    iteration = Round(store, number)
    iteration.arrive(ALONE)
    return variables_of(store.get(iteration.started).decode().removeprefix("go"))


Serving = Callable[..., threading.Thread]


def test_each_iteration_has_a_fresh_server_made_one_ahead(store: HashStore, serving: Serving) -> None:
    servers = dict[int, object]()
    thread = serving(servers, numbered())
    for number in range(4):
        found = started_with(store, number)
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == (HOST, str(1001 + number))
        assert found["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        until(lambda number=number: set(servers) == {number, number + 1}, "the next one is there, the last is gone")
        if number < 3:
            Round(store, number).interrupt("{}")
    Round(store, 3).announce_return(ALONE, 1)
    thread.join(60)
    assert set(servers) == {3, 4}, "what may still be in use is left"


def test_one_that_was_interrupted_before_it_began_is_gone_beyond(store: HashStore, serving: Serving) -> None:
    servers = dict[int, object]()
    serving(servers, numbered())
    until(lambda: set(servers) == {0}, "the first")
    Round(store, 0).interrupt("{}")
    assert started_with(store, 1)["MASTER_PORT"] == "1002"


def test_who_arrived_last_before_a_fault_gets_its_note(store: HashStore, serving: Serving) -> None:
    """A rank died at the start, and that was reported before the host of the stores looked."""
    with ThreadPoolExecutor(1) as rank:
        waiting = rank.submit(Round(store, 0).arrive, ALONE)
        Round(store, 0).interrupt("{}")
        serving({}, numbered())
        waiting.result(LIMIT_S)
    assert store.get(Round(store, 0).started) == b"fault"


def test_another_host_goes_on_where_the_ranks_are(store: HashStore, serving: Serving) -> None:
    """It replaces the server that went with the host before it."""
    servers = dict[int, object]()
    Round(store, 0).offer(store_address_of(HOST, 1))
    started_with(store, 0)
    Round(store, 1).offer(store_address_of(HOST, 2))
    serving(servers, numbered())
    until(lambda: set(servers) == {1}, "the one of the next iteration")
    until(
        lambda: b"1001" in store.get(Round(store, 1).store_address), "its note in the place of that of the host before"
    )
    Round(store, 0).interrupt("{}")
    assert started_with(store, 1)["MASTER_PORT"] == "1001"


def test_no_server_can_be_made(store: HashStore, serving: Serving) -> None:
    def serve() -> tuple[object, int]:
        raise OSError("no free port at 10.0.0.1")

    serving({}, serve)
    with pytest.raises(RuntimeError, match="could not be served: OSError: no free port at"):
        started_with(store, 0)
