"""The watcher: what it hands on, in which order, and when it must not wait."""

from __future__ import annotations

from torch.distributed import HashStore

from ft_client.inprocess.restart.machine import RestartEvent
from ft_client.inprocess.restart.store_watcher import StoreEvent, StoreWatcher
from rank_monitor.contract.rounds.barrier import Entry
from rank_monitor.contract.rounds.round import Round, tidy
from tests.patience import patient

LIMIT_S = patient(60)


def test_news_come_in_order_and_a_fault_after_the_interruption() -> None:
    store, story = HashStore(), list[object]()
    watcher = StoreWatcher(store, 0, 0, lambda number: story.append(f"interrupted {number}"))
    watcher.start()
    first, second = Round(store, 0), Round(store, 1)
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
        StoreEvent(RestartEvent.STARTED, "where"),
        "interrupted 0",
        StoreEvent(RestartEvent.INTERRUPTED, 0),
        StoreEvent(RestartEvent.STARTED, ""),
        StoreEvent(RestartEvent.DONE),
    ]
    assert closed == StoreEvent(RestartEvent.CLOSED, first.closing())


def test_who_was_stopped_for_long_follows_what_happened_to_the_end_that_was_without_it() -> None:
    store, interrupted = HashStore(), list[int]()
    for number in range(3):
        iteration = Round(store, number)
        iteration.offer("")
        iteration.arrive(Entry(0, 0, 1))
        tidy(store, number)
        iteration.interrupt("{}")
        iteration.account(Entry(0, 0, 1))
    watcher = StoreWatcher(store, 0, 1, interrupted.append)
    watcher.start()
    watcher.join(LIMIT_S)
    assert interrupted == [0]
    assert [watcher.events.get() for _ in range(watcher.events.qsize())] == [
        StoreEvent(RestartEvent.STARTED, ""),
        StoreEvent(RestartEvent.INTERRUPTED, 0),
        StoreEvent(RestartEvent.CLOSED, Round(store, 0).closing()),
    ]
