"""The signal that ends the launcher on this node: notes the first one, ends waits and blocking calls early, and has the
ranks save before they end.

Made by the node agent, as a source of events of its cycle loop and for the memberships, which wait for other things
too, and know whether ranks end for a signal to this launcher or to that of another node.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Set
from contextlib import suppress
from typing import TypeVar

from torch.distributed.elastic.multiprocessing import SignalException

from ft_launcher.agent.cycle.cycle import CyclePhase, Event
from ft_launcher.agent.event_source import EventSource
from ft_launcher.agent.ranks import Ranks
from ft_launcher.job.rendezvous.blocking_call import BlockingCall
from ft_launcher.node.processes.orphans import SAMPLE_S
from ft_launcher.node.processes.signals import RankSignal, rank_signal, time_to_end, told_to_end
from rank_monitor.contract.exit_codes import INTERRUPTED, ExitCode, died_of
from rank_monitor.contract.processes import proc
from rank_monitor.contract.processes.wait import readable

_T = TypeVar("_T")


class EndingSignal(EventSource):
    """The signal that ends the launcher on this node, once one has arrived.

    Args:
        ranks: of this node; among their `parts` are all signals to the launcher that end it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.signals = ranks.parts.signals
        self._ranks = ranks
        self._stop = ranks.parts.settings.stop
        self._arrived: list[int] = []
        self.exit_code: int | None = None
        """The launcher's exit code, once `error` was called, unless the job has ended otherwise all the same."""
        self.grace_ends_at = -math.inf
        """When the time is over that ranks have to save after a preemption (monotonic seconds)."""

    @property
    def number(self) -> int | None:
        """The first signal, which stands; None: none has arrived."""
        if not self._arrived:
            return None
        return self._arrived[0]

    @property
    def preempting(self) -> int:
        """The signal that preempts this node; 0 for none, and for Ctrl-C, which is no preemption."""
        if self.number is None or self.number == signal.SIGINT:
            return 0
        return self.number

    # As a source of events.

    def descriptors(self) -> set[int]:
        """Readable when a signal has arrived."""
        return {self.signals.fileno()}

    def poll(self, ready: Set[int]) -> list[Event]:
        """Notes the signals that have arrived; any of them ends the cycle."""
        numbers = self.signals.read()
        if not numbers:
            return []
        self.note(*numbers)
        return [CyclePhase.SIGNALLED]

    # For waits.

    def note(self, *numbers: int) -> None:
        """Notes signals that have arrived, in order, and says of those after the first what time they leave."""
        for number in numbers:
            before_s = self._time_to_end()
            self._arrived.append(number)
            left_s = self._time_to_end()
            if len(self._arrived) > 1 and left_s < before_s:
                self._ranks.parts.recorder.hurried(number, left_s)

    def wait(self, limit_s: float) -> int | None:
        """Waits for a signal, `limit_s` seconds at most; returns the first one there was, None without one."""
        deadline = time.monotonic() + limit_s
        while self.number is None:
            left_s = deadline - time.monotonic()
            number = self.signals.wait(min(left_s, SAMPLE_S))
            if number is not None:
                self.note(number)
            elif left_s <= SAMPLE_S:
                break
            self._ranks.reap_orphans()
        return self.number

    # While ranks end, as `process_tree.Hurry`.

    def fileno(self) -> int:
        """Returns a descriptor that is readable when a signal has arrived."""
        return self.signals.fileno()

    def time_left(self) -> float:
        """Notes the signals that have arrived; returns how long ranks may still take from now on (seconds).

        Infinity: as long as they have without a signal.
        """
        self.note(*self.signals.read())
        return self._time_to_end()

    def _time_to_end(self) -> float:
        return time_to_end(self._arrived, self._stop.workers_stop_timeout)

    def error(self, number: int, exit_code: int) -> SignalException:
        """Returns the exception with which a signal ends the launcher, and sets the exit code.

        `torch_launch.py` leaves the rendezvous open for other nodes then. It is torch's own class, since users of
        `launch()` and what classifies errors know it by its name.
        """
        self.exit_code = exit_code
        return SignalException(told_to_end(number), signal.Signals(number))

    def error_without_ranks(self, number: int) -> SignalException:
        """Returns the exception for a signal that ends the launcher while no rank runs, and sets the exit code."""
        if number == signal.SIGINT:
            return self.error(number, INTERRUPTED)
        if not self._ranks.were_started:  # it ends as any program does
            return self.error(number, died_of(number))
        return self.error(number, int(ExitCode.PREEMPTED))

    def call(self, work: Callable[[], _T]) -> _T:
        """Runs a blocking call (a rendezvous, a barrier) in a thread, and returns its result or raises what it raised.

        torch's calls cannot be cancelled: when a signal arrives, the thread is left behind.

        Raises:
            SignalException: a signal arrived before the call returned, or earlier, while ranks were stopped.
        """
        if self.number is not None:
            raise self.error_without_ranks(self.number)
        call = BlockingCall(work)
        try:
            while not call.is_done:
                readable([call.fileno(), self.signals.fileno()], SAMPLE_S)
                self._ranks.reap_orphans()
                self.note(*self.signals.read())
                if self.number is not None:
                    raise self.error_without_ranks(self.number)
        finally:
            call.close()
        return call.result()

    def call_at_end(self, work: Callable[[], object], after_signal_s: float) -> bool:
        """Runs a blocking call of the job's end (the departure from the rendezvous) in a thread; returns whether it has
        returned. A signal shortens it and changes nothing else: how the job has ended stays.

        Args:
            after_signal_s: how long it may take once a signal has arrived, also one that had arrived before (seconds).
                A signal that hurries the end shortens this. Then the thread is left behind.
        """
        try:
            call = BlockingCall(work)
        except RuntimeError:  # the system starts no further thread: better without an ear for signals than not at all
            work()
            return True
        deadline = math.inf
        try:
            while not call.is_done and time.monotonic() < deadline:
                if self.number is not None:
                    deadline = min(deadline, time.monotonic() + min(after_signal_s, self._time_to_end()))
                left_s = max(0.0, deadline - time.monotonic())
                readable([call.fileno(), self.signals.fileno()], min(left_s, SAMPLE_S))
                self._ranks.reap_orphans()
                self.note(*self.signals.read())
        finally:
            call.close()
        if call.is_done:
            call.result()
        return call.is_done

    # For ranks that save before they end.

    def preempt(self, number: int) -> int:
        """Sends the ranks the signal that stands for `number` once, and waits while they save. No limit is judged.

        Returns:
            The launcher's exit code.
        """
        ranks = self._ranks
        self.grace_ends_at = time.monotonic() + self._stop.preemption_grace
        ranks.monitors.end_cycle()
        self._signal_ranks(rank_signal(number, ranks.parts.named_signals, self._stop.preemption_signal))
        if self._wait_for_exits(self._stop.preemption_grace):
            ranks.stop()
            return int(ExitCode.PREEMPTED)
        ranks.stop(limit_s=0.0)
        return int(ExitCode.PREEMPTED_KILLED)

    def end_ranks(self) -> SignalException:
        """Ends the ranks after a signal to this launcher; returns the exception with which the launcher ends."""
        assert self.number is not None
        recorder = self._ranks.parts.recorder
        recorder.signalled(self.number)
        if self.number == signal.SIGINT:
            # Ctrl-C reaches the ranks as SIGINT, as it would from the terminal: they are in sessions of their own.
            self._ranks.stop(signal.SIGINT)
            error = self.error_without_ranks(self.number)
        else:
            error = self.error(self.number, self.preempt(self.number))
        if self.exit_code is not None:
            recorder.ended_by_signal(self.exit_code)
        return error

    def await_agreed_exits(self) -> None:
        """Waits until ranks that have agreed to exit have saved and ended, for `--workers-stop-timeout` at most.

        A signal to the launcher meanwhile is noted.
        """
        self._wait_for_exits(self._stop.workers_stop_timeout)

    def _signal_ranks(self, asked: RankSignal) -> None:
        """Sends each rank's main process the signal; SIGTERM if the rank has no handler and needs one.

        Not to its tree: data loaders must not end while their rank saves.
        """
        pids = self._ranks.processes.pids()
        for local_rank, pidfd in self._ranks.processes.pidfds.items():
            handled = asked.always or proc.catches(proc.status(pids[local_rank]), asked.number)
            with suppress(OSError):  # it has just ended, and another process took its end
                signal.pidfd_send_signal(pidfd, asked.number if handled else signal.SIGTERM)
                # A stopped process handles the signal only when it runs again.
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)

    def _wait_for_exits(self, limit_s: float) -> bool:
        """Waits until all ranks have ended, at most `limit_s`; returns whether they have.

        A signal to the launcher meanwhile is noted, and says how long to wait from then on.
        """
        processes, deadline = self._ranks.processes, time.monotonic() + min(limit_s, self.time_left())
        while processes.pidfds and (left := deadline - time.monotonic()) > 0:
            readable([*processes.pidfds.values(), *self.descriptors()], min(left, SAMPLE_S))
            self._ranks.reap_orphans()
            # A signal never lengthens the wait.
            deadline = min(deadline, time.monotonic() + self.time_left())
            processes.reap_all()
        return not processes.pidfds
