"""Runs what blocks (a rendezvous, a barrier) in a thread, so that a signal to the launcher is heeded meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ft_launcher.signals import SignalPipe
from rank_monitor.contract import resolver
from rank_monitor.contract.wait import readable

_T = TypeVar("_T")


class ToldMeanwhile(Exception):
    """A signal came; the thread is left behind."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_aside(work: Callable[[], _T], signals: SignalPipe) -> _T:
    """The result of `work`, or what it raised.

    Raises:
        ToldMeanwhile: the launcher got a signal before `work` was done.
    """
    done, at_work = os.pipe()
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            with resolver.usual():
                outcome.set_result(work())
        except BaseException as error:  # handed to the caller's thread
            outcome.set_exception(error)
        finally:
            os.close(at_work)

    threading.Thread(target=run, daemon=True, name="ft_aside").start()
    try:
        while not readable([done]):
            readable([done, signals.fileno()], None)
            for number in signals.read():
                raise ToldMeanwhile(number)
    finally:
        os.close(done)
    return outcome.result()
