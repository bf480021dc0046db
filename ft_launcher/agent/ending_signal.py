"""The signal that ends the launcher on this node: notes it, ends waits and blocking calls early, and has the ranks save
before they end.

Made by the node agent. Three parts of the launcher use it:
- The cycle loop polls it as a source of events: a signal ends the cycle.
- The membership waits through it, while no cycle runs (`wait`, `call`, `call_at_end`), so that a signal is noticed.
- A stop of processes asks it how long they may still take (`process_tree.Hurry`).

The first signal decides how the launcher ends; each further one can only shorten the time (`signals.time_to_end`). Runs
on the agent's thread. What a signal means for the ranks of other nodes is the coordinator's to decide.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
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
        ranks: of this node. Their `parts.signals` are the signals to the launcher that end it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.signals = ranks.parts.signals
        self._ranks = ranks
        self._stop = ranks.parts.settings.stop
        self._arrived: list[int] = []
        self.exit_code: int | None = None
        """The launcher's exit code, once `error` was called. Not used where the job had ended for another reason."""
        self.grace_ends_at = -math.inf
        """When the time ends that ranks have to save after a preemption, in the present cycle or at its end (monotonic
        seconds)."""

    @property
    def number(self) -> int | None:
        """The first signal that has arrived, which decides how the launcher ends; None: none has arrived."""
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

    @contextmanager
    def during_cycle(self) -> Iterator[None]:
        """Forgets the grace of an earlier preemption: another node was preempted, and the job has gone on in this
        cycle. What the launcher does at its own end, perhaps hours later, has a time of its own.

        The grace stays until then. Where no further cycle comes, this node may host the store of ranks that save.
        """
        self.grace_ends_at = -math.inf
        yield

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
        """Notes signals that have arrived, in order. Reports each further one that shortens the time to end."""
        for number in numbers:
            before_s = self._time_to_end()
            self._arrived.append(number)
            left_s = self._time_to_end()
            if len(self._arrived) > 1 and left_s < before_s:
                self._ranks.parts.recorder.hurried(number, left_s)

    def wait(self, limit_s: float) -> int | None:
        """Blocks until a signal has arrived, `limit_s` seconds at most; reaps orphans meanwhile.

        Returns:
            The first signal of all, also one from before this call; None: there was none.
        """
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

        Infinity: the signals set no limit, and the one that the caller has holds.
        """
        self.note(*self.signals.read())
        return self._time_to_end()

    def _time_to_end(self) -> float:
        """Returns how long ranks may take to end after the signals that have arrived (seconds)."""
        return time_to_end(self._arrived, self._stop.workers_stop_timeout)

    def error(self, number: int, exit_code: int) -> SignalException:
        """Returns the exception with which a signal ends the launcher, and sets the exit code.

        The class is torch's: `torch_launch.py` leaves the rendezvous open for the other nodes when it sees this class,
        and users of `launch()` catch it by its name.
        """
        self.exit_code = exit_code
        return SignalException(told_to_end(number), signal.Signals(number))

    def error_without_ranks(self, number: int) -> SignalException:
        """Returns the exception for a signal that ends the launcher while no rank runs, and sets the exit code."""
        if number == signal.SIGINT:
            return self.error(number, INTERRUPTED)
        if not self._ranks.were_started:  # The launcher ends as any program does that dies of the signal.
            return self.error(number, died_of(number))
        return self.error(number, int(ExitCode.PREEMPTED))

    def call(self, work: Callable[[], _T]) -> _T:
        """Runs a blocking call (a rendezvous, a barrier, health checks) in a thread; returns what it returns.

        Blocks until the call ends or a signal arrives. torch's calls cannot be cancelled: when a signal arrives, the
        thread is left behind. Raises also what the call raises.

        Raises:
            SignalException: a signal arrived before the call returned, or had arrived earlier, while ranks were
                stopped.
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
        """Runs a blocking call of the job's end (the departure from the rendezvous) in a thread.

        Blocks until the call ends. A signal limits the wait, and changes nothing else: how the job has ended stays.

        Args:
            work: the call.
            after_signal_s: how long the call may take once a signal has arrived, also one from before (seconds). A
                further signal may shorten this. Afterwards the thread is left behind.

        Returns:
            Whether the call has returned.
        """
        try:
            call = BlockingCall(work)
        except RuntimeError:
            # The system starts no further thread. Better a call that no signal can shorten than none at all.
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
        """Sends the ranks the signal that stands for `number`, once, and waits while they save.

        The monitors judge no limit meanwhile: a rank that saves makes no steps. Blocks for `--ft-preemption-grace` at
        most, then kills the ranks that are left.

        Args:
            number: the signal that this launcher, or the launcher of another node, has got.

        Returns:
            The launcher's exit code: whether all ranks ended by themselves, or some were killed.
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
        """Ends the ranks after a signal to this launcher; returns the exception with which the launcher ends.

        Ctrl-C stops the ranks as the terminal would. Every other signal is a preemption: the ranks may save.
        """
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

        Notes a signal to the launcher that arrives meanwhile.
        """
        self._wait_for_exits(self._stop.workers_stop_timeout)

    def _signal_ranks(self, asked: RankSignal) -> None:
        """Sends each rank's main process the signal; SIGTERM where the rank has no handler for it and needs one.

        Children of the ranks get no signal: data loaders must not end while their rank saves.
        """
        pids = self._ranks.processes.pids()
        for local_rank, pidfd in self._ranks.processes.pidfds.items():
            handled = asked.always or proc.catches(proc.status(pids[local_rank]), asked.number)
            with suppress(OSError):  # The rank has just ended, and another process has taken its exit code.
                signal.pidfd_send_signal(pidfd, asked.number if handled else signal.SIGTERM)
                # A stopped process handles the signal only when it runs again.
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)

    def _wait_for_exits(self, limit_s: float) -> bool:
        """Waits until all ranks have ended, `limit_s` seconds at most; returns whether all have.

        A signal to the launcher that arrives meanwhile is noted, and may shorten the wait.
        """
        processes, deadline = self._ranks.processes, time.monotonic() + min(limit_s, self.time_left())
        while processes.pidfds and (left := deadline - time.monotonic()) > 0:
            readable([*processes.pidfds.values(), *self.descriptors()], min(left, SAMPLE_S))
            self._ranks.reap_orphans()
            # A signal never lengthens the wait.
            deadline = min(deadline, time.monotonic() + self.time_left())
            processes.reap_all()
        return not processes.pidfds
