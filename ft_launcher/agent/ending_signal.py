"""The signal that ends the launcher on this node: notes the first one, and ends waits and blocking calls early.

Made by the node agent, as a source of events of its cycle loop and for the memberships, which wait for other things
too. Sends no signal to a rank: `preemption.py` does.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Set
from concurrent.futures import Future
from typing import TypeVar

from torch.distributed.elastic.multiprocessing import SignalException

from ft_launcher.agent.membership import EventSource
from ft_launcher.cycle.cycle import CyclePhase, Event
from ft_launcher.processes.signals import SignalPipe
from rank_monitor.contract.exit_codes import INTERRUPTED, ExitCode, died_of
from rank_monitor.contract.processes import resolver
from rank_monitor.contract.processes.wait import readable

_T = TypeVar("_T")


class EndingSignal(EventSource):
    """The signal that ends the launcher on this node, once one has arrived.

    Args:
        signals: all signals to the launcher that end it.
        stop_limit_s: how long ranks may take to end after a second signal, or after Ctrl-C (seconds).
    """

    def __init__(self, signals: SignalPipe, stop_limit_s: float) -> None:
        self.signals = signals
        self._stop_limit_s = stop_limit_s
        self.number: int | None = None
        """The first signal; None: none has arrived."""
        self.ranks_were_started = False
        """Whether a rank of this job has run: without one, the launcher ends as any program does."""
        self.exit_code: int | None = None
        """The launcher's exit code, once `error` was called, unless the job has ended otherwise all the same."""

    # As a source of events.

    def descriptors(self) -> set[int]:
        """Readable when a signal has arrived."""
        return {self.signals.fileno()}

    def attend(self, ready: Set[int]) -> list[Event]:
        """Notes the signals that have arrived; any of them ends the cycle."""
        numbers = self.signals.read()
        if not numbers:
            return []
        self.note(numbers[0])
        return [CyclePhase.SIGNALLED]

    # For waits.

    def note(self, number: int) -> None:
        """Notes a signal; the first one stands."""
        if self.number is None:
            self.number = number

    def wait(self, limit_s: float) -> int | None:
        """Waits for a signal, `limit_s` seconds at most; returns the first one there was, None without one."""
        if self.number is None:
            self.number = self.signals.wait(limit_s)
        return self.number

    def note_and_limit(self, number: int) -> float:
        """Notes a signal that arrived while ranks end; returns how long they may still take (seconds).

        The second signal, and any Ctrl-C, shortens their time to `--workers-stop-timeout`.
        """
        is_first = self.number is None
        self.note(number)
        if is_first and number != signal.SIGINT:
            return math.inf
        return self._stop_limit_s

    def error(self, number: int, exit_code: int) -> SignalException:
        """Returns the exception with which a signal ends the launcher, and sets the exit code.

        torch's `launch_agent` leaves the rendezvous open for other nodes then. It is torch's own class, since users of
        `launch()` and what classifies errors know it by its name.
        """
        self.exit_code = exit_code
        return SignalException(f"told to end by signal {number}", signal.Signals(number))

    def error_without_ranks(self, number: int) -> SignalException:
        """Returns the exception for a signal that ends the launcher while no rank runs, and sets the exit code."""
        if number == signal.SIGINT:
            return self.error(number, INTERRUPTED)
        if not self.ranks_were_started:
            return self.error(number, died_of(number))
        return self.error(number, int(ExitCode.PREEMPTED))

    def call(self, work: Callable[[], _T]) -> _T:
        """Runs a blocking call (a rendezvous, a barrier) in a thread, and returns its result or raises what it raised.

        torch's calls cannot be cancelled: when a signal arrives, the thread is left behind.

        Raises:
            SignalException: a signal arrived before the call returned.
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
        threading.Thread(target=run, daemon=True, name="ft_blocking_call").start()
        try:
            while not readable([done], 0.0):
                readable([done, self.signals.fileno()], None)
                for number in self.signals.read():
                    raise self.error_without_ranks(number)
        finally:
            os.close(done)
        return outcome.result()
