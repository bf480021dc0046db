"""Threads that `threading` does not know, and what they have done in ordinary ones."""

from __future__ import annotations

import logging
import signal
import threading

import pytest

from ft_client.rank.monitoring import hidden_thread
from tests.patience import until

logger = logging.getLogger(__name__)


def test_a_hidden_thread_is_in_no_list_and_takes_no_signal() -> None:
    before, count = set(threading.enumerate()), hidden_thread.count()
    masks, go_on = list[set[int]](), threading.Event()

    def run() -> None:
        masks.append({*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))})
        go_on.wait()

    hidden_thread.start(run)
    until(lambda: bool(masks), "the thread")
    assert set(threading.enumerate()) == before
    assert hidden_thread.count() == count + 1
    assert {signal.SIGTERM, signal.SIGINT} <= masks[0] and signal.SIGSEGV not in masks[0]
    go_on.set()
    until(lambda: hidden_thread.count() == count, "its end")


def test_what_logs_is_run_in_an_ordinary_thread_which_is_gone_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    hidden_thread.start(lambda: hidden_thread.run_in_ordinary(lambda: logger.warning("said"), "ft_client test"))
    until(lambda: "said" in caplog.text, "the record")
    assert caplog.records[-1].threadName == "ft_client test"
    until(lambda: set(threading.enumerate()) <= before, "no thread more than before")


def test_where_no_thread_can_be_started_it_is_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    done: list[str] = []
    hidden_thread.run_in_ordinary(lambda: done.append("done"), "ft_client test")
    assert done == ["done"]
