"""The threads of a cycle end with it, while the server of its store still lives."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from ft_launcher.agent.in_process.store_threads import Keys, StoreThreads, connect
from tests.patience import patient


def test_the_end_of_a_cycle_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that ends the waits neither: it may connect for one more when the last of them has ended."""
    monkeypatch.setattr("ft_launcher.agent.in_process.store_threads.THREAD_ENDS_S", patient(30.0))
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waits, ended = threading.Event(), threading.Event()

    def connection() -> TCPStore:
        store = connect("127.0.0.1", server.port)
        if threading.current_thread().name == "ft_release":
            # The key is written just now, and the wait for it ends.
            store.set("call/key", "here")
            assert ended.wait(patient(30.0))
            time.sleep(0.1)  # the caller of `close` goes on meanwhile, unless it waits for this thread
        return store

    def wait_for_key(keys: Keys) -> None:
        waits.set()
        keys.wait(["key"], timedelta(seconds=patient(60.0)))

    threads = StoreThreads(connection)
    threads.start("ft_test", "call", task=wait_for_key, end=lambda problem: ended.set())
    assert waits.wait(patient(30.0))
    threads.close()
    assert not {"ft_test", "ft_release"} & {thread.name for thread in threading.enumerate()}
