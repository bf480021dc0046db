"""The watcher: what it hands on, in which order, and when it must not wait."""

from __future__ import annotations

import datetime

from torch.distributed import HashStore

from ft_client.inprocess.restart import store_watcher
from ft_client.inprocess.restart.store_watcher import StoreWatcher
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.iterations.barrier import Entry
from rank_monitor.contract.iterations.iteration import Iteration, tidy
from tests.patience import patient

LIMIT_S = patient(60)


def test_news_come_in_order_and_a_fault_after_the_interruption() -> None:
    store, story = HashStore(), list[object]()
    watcher = StoreWatcher(store, 0, 0, lambda number: story.append(f"interrupted {number}"))
    watcher.start()
    first, second = Iteration(store, 0), Iteration(store, 1)
    first.offer("where")
    first.arrive(Entry(0, 0, 1))
    story.append(watcher.events.get(timeout=LIMIT_S))
    first.interrupt("{}")
    story.append(watcher.events.get(timeout=LIMIT_S))
    first.account(Entry(0, 0, 1))
    closed = watcher.events.get(timeout=LIMIT_S)
    second.offer("")
    second.arrive(Entry(0, 0, 1))
    story.append(watcher.events.get(timeout=LIMIT_S))
    second.announce_return(Entry(0, 0, 1), 1)
    story.append(watcher.events.get(timeout=LIMIT_S))
    watcher.join(LIMIT_S)
    assert story == [
        store_watcher.Started("where"),
        "interrupted 0",
        store_watcher.FaultReported(0),
        store_watcher.Started(""),
        store_watcher.Done(),
    ]
    assert closed == first.closing()


def test_who_was_stopped_for_long_does_not_wait_for_what_is_forgotten() -> None:
    store, interrupted = HashStore(), list[int]()
    tidy(store, 4)
    watcher = StoreWatcher(store, 1, 0, interrupted.append)
    watcher.start()
    event = watcher.events.get(timeout=LIMIT_S)
    assert isinstance(event, store_watcher.StoreGone)
    assert isinstance(event.problem, ProtocolError)
    assert interrupted == [1]


def test_who_is_stopped_just_before_it_waits_does_not_wait_for_ever() -> None:
    """The others set the key, went on and forgot it after this rank had seen that it was not forgotten."""

    class Stops(HashStore):
        def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None:
            tidy(self, 4)
            tidy(self, 90)
            super().wait(keys, timeout)

    watcher = StoreWatcher(Stops(), 1, 0, lambda number: None)
    watcher.start()
    event = watcher.events.get(timeout=LIMIT_S)
    assert isinstance(event, store_watcher.StoreGone)
    assert isinstance(event.problem, ProtocolError)
