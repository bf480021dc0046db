"""What the agent tells the ranks' store for a dead rank, on a real store: who takes note, and how the threads end."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from torch.distributed import PrefixStore, TCPStore

from ft_launcher.agent.in_process.rank_loss import RankLossNotifier
from ft_launcher.agent.in_process.recovery_steps import LossNotified, NotifyLoss
from ft_launcher.agent.in_process.store_threads import StoreThreads, connect
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.rounds.barrier import Entry
from rank_monitor.contract.rounds.round import DONE, Round, joining
from tests.patience import patient, until

PREFIX = "call/0"
HOST = "127.0.0.1"
DEADLINE_S = patient(20.0)


@pytest.fixture
def threads(server: TCPStore) -> StoreThreads:
    return StoreThreads(partial(connect, HOST, server.port))


@pytest.fixture
def departures(threads: StoreThreads) -> Iterator[RankLossNotifier]:
    departures = RankLossNotifier(threads, stop_s=DEADLINE_S, on_reaped=lambda pid: None)
    yield departures
    threads.close()
    until(have_ended)
    departures.notified.close()


@pytest.fixture
def dead() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait()
    return process.pid


def notify(joins: bool = False, limit_s: float = DEADLINE_S) -> NotifyLoss:
    return NotifyLoss(1, 5, PREFIX, limit_s, joins)


def have_ended() -> bool:
    """Whether all threads have: `StoreThreads.close` waits half a second for each at most, which is little here."""
    return not any(thread.name.startswith("ft_departure") for thread in threading.enumerate())


def taken(departures: RankLossNotifier) -> LossNotified:
    assert readable([departures.notified.fileno()], DEADLINE_S)
    (loss_notified,) = departures.notified.drain()
    return loss_notified


def test_the_others_take_note(departures: RankLossNotifier, server: TCPStore, dead: int) -> None:
    round_ = Round(PrefixStore(PREFIX, server), 0)
    departures.notify(notify(), dead)
    until(lambda: bool(round_.records()))
    assert round_.records() == ['{"rank": 5, "interruption": "TERMINATED"}']
    for member in range(5):
        round_.account(Entry(member, member, 6))
    assert taken(departures) == LossNotified(1, "")
    closed = round_.closing()
    assert closed is not None and closed.has(4) and not closed.has(5)


def test_they_do_not_in_time(departures: RankLossNotifier, dead: int) -> None:
    departures.notify(notify(limit_s=0.1), dead)
    loss_notified = taken(departures)
    assert loss_notified.local_rank == 1 and loss_notified.problem


def test_a_wish_to_join_is_taken_back(departures: RankLossNotifier, server: TCPStore, dead: int) -> None:
    store = PrefixStore(PREFIX, server)
    joining(store).sign(Entry(5))
    departures.notify(notify(joins=True), dead)
    until(lambda: [entry.is_well for entry in joining(store).entries()] == [True, False])
    store.set(Round(store, 0).outcome, DONE)
    assert taken(departures) == LossNotified(1, "")


@pytest.mark.parametrize("joins", [False, True])
def test_the_end_of_the_cycle_ends_a_wait(
    departures: RankLossNotifier, threads: StoreThreads, server: TCPStore, dead: int, joins: bool
) -> None:
    store = PrefixStore(PREFIX, server)
    departures.notify(notify(joins, limit_s=3600.0), dead)
    until(lambda: bool(joining(store).entries() if joins else Round(store, 0).end.entries()))
    threads.close()
    until(have_ended)
    assert [loss_notified.problem for loss_notified in departures.notified.drain()] == ["the cycle is over"]


def test_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch, dead: int) -> None:
    monkeypatch.setattr("ft_launcher.agent.in_process.store_threads._CONNECT_S", 0.1)
    threads = StoreThreads(partial(connect, HOST, 1))
    gone = RankLossNotifier(threads, stop_s=0.0, on_reaped=lambda pid: None)
    gone.notify(notify(), dead)
    assert taken(gone).problem
    threads.close()
    gone.notified.close()


def test_what_the_rank_left_is_ended(departures: RankLossNotifier, server: TCPStore) -> None:
    rank = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!"], start_new_session=True, stdout=subprocess.PIPE)
    assert rank.stdout is not None
    left = int(rank.stdout.readline())
    rank.wait()
    server.set(f"{PREFIX}/0/outcome", DONE)
    departures.notify(notify(), rank.pid)
    assert taken(departures) == LossNotified(1, "")
    until(lambda: not _lives(left))


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
