"""Ranks that all come, and ranks of which some do not: threads over a store of torch's in this process."""

from __future__ import annotations

import datetime
import signal
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore

from ft_client.rank.agreement.roll_call import NotAllCame, RollCall, limit_s
from rank_monitor.contract.rounds.barrier import Arrivals
from tests.patience import patient, until

CALL, INSTEAD = "keep.load()", "keep.step()"
LONG_S = 3600.0
PATIENT_S = patient(60.0)


def has_come(came: Arrivals, rank: int) -> bool:
    return rank in {entry.entry_rank for entry in came.entries()}


class Ranks:
    """The ranks of a group, each of which begins its calls in a thread."""

    def __init__(self, size: int, pool: ThreadPoolExecutor) -> None:
        self.store: Any = HashStore()
        self.store.set_timeout(datetime.timedelta(seconds=PATIENT_S))
        self._pool = pool
        self.ranks = [RollCall(CALL, self.store, rank, size) for rank in range(size)]

    def begin(self, of: Collection[int], limit_s: float = LONG_S) -> dict[int, Future[None]]:
        """Some ranks begin their next call, one after the other."""
        begun = {}
        for rank in of:
            came = Arrivals(self.store, f"{int(self.store.add(f'calls/{rank}', 0)) + 1}/came")
            begun[rank] = self._pool.submit(self.ranks[rank].await_all, limit_s)
            until(partial(has_come, came, rank))
        return begun

    def say_absent(self, *of: int) -> None:
        for rank in of:
            self.ranks[rank].say_absent(INSTEAD)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def errors(begun: dict[int, Future[None]]) -> dict[int, str]:
    """The error of each rank that has one."""
    ended = {rank: future.exception(PATIENT_S) for rank, future in begun.items()}
    assert all(error is None or isinstance(error, NotAllCame) for error in ended.values()), ended
    return {rank: str(error) for rank, error in ended.items() if error is not None}


def error(came: str, missing: str, reason: str) -> str:
    every = "All ranks of the default process group must call it"
    return f"{CALL} was called by {came} and not by {missing}: {reason}. {every}"


def test_all_come_one_after_the_other_again_and_again(pool: ThreadPoolExecutor) -> None:
    ranks, keys = Ranks(4, pool), set()
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        begun = ranks.begin(order[:-1])
        assert not any(future.done() for future in begun.values())
        begun |= {order[-1]: pool.submit(ranks.ranks[order[-1]].await_all, LONG_S)}
        assert errors(begun) == {}
        keys.add(ranks.store.num_keys())
    assert keys == {4 + 3}, "one of each rank, and those of the last call"


@pytest.mark.parametrize("is_before", [True, False], ids=["before the others come", "while they wait"])
def test_a_rank_that_goes_on_without_the_call_is_named_at_once(pool: ThreadPoolExecutor, is_before: bool) -> None:
    ranks = Ranks(3, pool)
    if is_before:
        ranks.say_absent(1)
    begun = ranks.begin((0, 2))
    if not is_before:
        ranks.say_absent(1)
    found = errors(begun)
    assert found.keys() == {0, 2} and len(set(found.values())) == 1
    by_whom = {
        error(came, missing, reason)
        for came, missing in (("ranks 0,2", "rank 1"), ("rank 0", "ranks 1-2"))
        for reason in ("rank 1 has gone on without it", f"rank 1 has called {INSTEAD} without it")
    }
    assert set(found.values()) <= by_whom


def test_ranks_that_all_do_so_before_the_call_are_no_mistake(pool: ThreadPoolExecutor) -> None:
    """They begin the call late, all of them: one of them may be slow."""
    ranks = Ranks(3, pool)
    ranks.say_absent(0, 2)
    begun = ranks.begin((0, 2))
    ranks.say_absent(1)
    assert not any(future.done() for future in begun.values())
    begun[1] = pool.submit(ranks.ranks[1].await_all, LONG_S)
    assert errors(begun) == {}


def test_a_rank_that_has_come_before_and_goes_on_without_the_next_call(pool: ThreadPoolExecutor) -> None:
    ranks = Ranks(2, pool)
    assert errors({rank: pool.submit(ranks.ranks[rank].await_all, LONG_S) for rank in (0, 1)}) == {}
    ranks.say_absent(1)
    assert errors(ranks.begin((0,))) == {0: error("rank 0", "rank 1", "rank 1 has gone on without it")}


def test_after_the_limit_all_that_came_get_the_same_error_and_so_do_those_that_come_later(
    pool: ThreadPoolExecutor,
) -> None:
    ranks = Ranks(5, pool)
    begun = ranks.begin((0, 2, 3)) | ranks.begin((1,), limit_s=0.0)
    found = errors(begun)
    text = error("ranks 0-3", "rank 4", "these did not call it within 0 s")
    assert found == dict.fromkeys(range(4), text)
    assert errors(ranks.begin((4,))) == {4: text}


def test_a_slow_rank_is_waited_for_until_a_little_before_the_timeout_of_the_group() -> None:
    assert [limit_s(timeout_s) for timeout_s in (10.0, 600.0, 1800.0)] == [9.0, 540.0, 1740.0]


def test_an_interruption_ends_the_wait(pool: ThreadPoolExecutor) -> None:
    """As that of a restart in process, by a signal: the wait is no call of the store that Python cannot interrupt."""
    ranks = Ranks(2, pool)

    class Looks:
        """The store, which sends the signal at each look."""

        def check(self, keys: list[str]) -> bool:
            signal.pthread_kill(waiting, signal.SIGINT)
            return interrupted.wait(PATIENT_S)

        def __getattr__(self, name: str) -> Any:
            return getattr(ranks.store, name)

    store: Any = Looks()
    waiting, interrupted = threading.get_ident(), threading.Event()
    with pytest.raises(KeyboardInterrupt):
        RollCall(CALL, store, 0, 2).await_all(LONG_S)
    interrupted.set()
    until(no_thread_looks)


def test_the_thread_that_waits_executes_no_python_and_gets_the_errors_of_the_store(pool: ThreadPoolExecutor) -> None:
    """So a monitor sees it stand still, as in a collective."""
    ranks = Ranks(2, pool)
    waiting, looked_in = threading.get_ident(), []

    class Lost:
        """The store, which is lost at the first look."""

        def check(self, keys: list[str]) -> bool:
            looked_in.append(threading.get_ident())
            raise RuntimeError("the store is gone")

        def __getattr__(self, name: str) -> Any:
            return getattr(ranks.store, name)

    store: Any = Lost()
    with pytest.raises(RuntimeError, match="the store is gone"):
        RollCall(CALL, store, 0, 2).await_all(LONG_S)
    assert waiting not in looked_in
    until(no_thread_looks)


def no_thread_looks() -> bool:
    return not any(thread.name == "ft_roll_call" for thread in threading.enumerate())
