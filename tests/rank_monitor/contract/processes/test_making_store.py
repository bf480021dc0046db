"""Stores are made one after the other, and a thread that hangs while it makes one holds up nobody for long."""

from __future__ import annotations

import threading
import time

import pytest
import torch  # noqa: F401  # which release it is decides whether threads wait

from rank_monitor.contract.processes.making_store import making_store
from tests.patience import patient


@pytest.fixture(autouse=True)
def _every_torch_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rank_monitor.contract.processes.making_store.MENDED_IN", "99")


def test_one_thread_at_a_time() -> None:
    inside, most = 0, 0

    def make() -> None:
        nonlocal inside, most
        for _ in range(20):
            with making_store():
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)  # another thread may run here
                inside -= 1

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patient(30))
    assert (most, inside) == (1, 0)


def test_a_thread_that_hangs_holds_up_nobody_for_long() -> None:
    """Of those that come after it, one is inside at a time all the same."""
    hangs, ends, inside, most = threading.Event(), threading.Event(), 0, 0

    def hang() -> None:
        with making_store():
            hangs.set()
            ends.wait(patient(60))

    def make() -> None:
        nonlocal inside, most
        with making_store(patient(60)):
            inside += 1
            most = max(most, inside)
            time.sleep(0.001)  # another thread may run here
            inside -= 1

    hanging = threading.Thread(target=hang)
    hanging.start()
    assert hangs.wait(patient(30))
    threads = [threading.Thread(target=make) for _ in range(4)]
    with making_store(0):
        assert hanging.is_alive()
        for thread in threads:
            thread.start()
        ends.set()  # its end is not the end of another thread's turn
        hanging.join(patient(30))
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)  # the others may run here
        inside -= 1
    for thread in threads:
        thread.join(patient(30))
    assert (most, inside) == (1, 0)


def test_no_thread_waits_once_torch_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rank_monitor.contract.processes.making_store.MENDED_IN", "1.0")
    with making_store(threading.TIMEOUT_MAX), making_store(threading.TIMEOUT_MAX):
        pass
