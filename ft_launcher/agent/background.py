"""Runs a blocking call (a rendezvous, a barrier) in a thread, so that the main thread goes on handling signals.

Called by the node agent. torch's calls cannot be cancelled: a thread whose call is interrupted is a daemon and is
left behind.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ft_launcher.processes.signals import SignalPipe
from rank_monitor.contract.processes import resolver
from rank_monitor.contract.processes.wait import readable

_T = TypeVar("_T")


class InterruptedBySignal(Exception):
    """The launcher got signal `number` before the call returned; the thread is left behind."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_aside(work: Callable[[], _T], signals: SignalPipe) -> _T:
    """Runs `work` in a thread and returns its result, or raises what it raised. Blocks until then.

    Raises:
        InterruptedBySignal: the launcher got a signal before `work` was done.
    """
    # The thread closes its end when the call is done, which wakes `readable` below: an event, not a poll.
    done, at_work = os.pipe()
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            # The launcher bounds its look-ups of names; the name of a host may take longer than that bound.
            with resolver.usual():
                outcome.set_result(work())
        except BaseException as error:  # handed to the caller's thread
            outcome.set_exception(error)
        finally:
            os.close(at_work)

    # A daemon, since nothing can cancel torch's call: the launcher must be able to end while it blocks.
    threading.Thread(target=run, daemon=True, name="ft_aside").start()
    try:
        while not readable([done]):
            readable([done, signals.fileno()], None)
            for number in signals.read():
                raise InterruptedBySignal(number)
    finally:
        os.close(done)
    return outcome.result()
