"""The user's function in one call: what a thread that interrupts it finds of it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from ft_client.inprocess.arguments import Arguments
from ft_client.inprocess.attribution import LastInterruption
from ft_client.inprocess.restart.machine import RestartEvent
from ft_client.inprocess.restart.user_function import UserFunction
from ft_client.inprocess.state import State
from tests.client.inprocess.job import seconds
from tests.patience import patient

LONG_S = patient(60.0)


@pytest.mark.parametrize("aborts", [True, False])
def test_no_function_begins_to_run_once_its_interruption_is_reported(aborts: bool) -> None:
    """The monitor was told nothing about it: it would judge that function by its progress, and a loop that swallows
    interruptions makes progress."""
    is_reported, is_decided = threading.Event(), threading.Event()
    entered: list[Any] = []

    class Link:
        """That to the monitor. Its report takes until the main thread has come to the function, or was kept from it."""

        def interrupting(self) -> None:
            is_reported.set()
            is_decided.wait(LONG_S)

        def interrupt_grace_s(self) -> float:
            return LONG_S

        def interrupted_again(self, *about: Any) -> None:
            raise AssertionError(about)

    def function(call: Any) -> None:
        entered.append(call)
        is_decided.set()
        time.sleep(LONG_S)

    def abort(state: Any) -> Any:
        return state

    arguments = Arguments(store_factory=HashStore, abort=abort if aborts else None, last_call_wait=seconds(0))
    link: Any = Link()
    user_function = UserFunction(arguments, function, State(0, 1), link, lambda number: LastInterruption())
    watcher = threading.Thread(target=user_function.interrupt)
    try:
        watcher.start()
        assert is_reported.wait(LONG_S)
        event = user_function.run()
        is_decided.set()
        watcher.join(LONG_S)
    finally:
        user_function.close()
    assert event is RestartEvent.INTERRUPTED and not entered and not watcher.is_alive()
