"""Connects the wrapper with this rank's monitor: tells it whether the function runs or a restart is under way, and
receives its requests to restart. `call.py` makes one for each call of a wrapped function.

Without a monitor nothing is sent. Iterations and stores are not interpreted here. The wrapper calls it in the main
thread, the watchdog in its own: objects that both use are replaced as a whole and never changed.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection
from time import monotonic_ns

from ft_client.inprocess.arguments import Timeouts
from ft_client.rank.monitoring import process
from ft_client.rank_monitor_client import RankMonitorClient
from rank_monitor.contract.wire import messages
from rank_monitor.contract.wire.messages import (
    InterruptAsked,
    InterruptedAgain,
    LogTo,
    Message,
    Ping,
    Progress,
    Restarter,
    WrapperPhase,
    WrapperState,
)

logger = logging.getLogger(__name__)

# A monitor that does not read must not hold up a restart; the link repeats what it missed.
_SEND_TIMEOUT_S = 0.1
# Characters of a stack, its innermost frames: in JSON at most 24,576 bytes, so it fits into one message.
_MAX_STACK = 4096
# A stamp may be two periods old although the main thread runs; that is a quarter of the timeout at most.
_STAMPS_PER_TIMEOUT = 8


class MonitorLink:
    """The connection of one call of the wrapped function with the monitor.

    Args:
        timeouts: the wrapper's.
        logfile: where the monitor also writes its log; empty: nowhere.
        interrupted: called with the reason, in the watchdog's thread, when the monitor asks for a restart: the function
            made no progress. May take milliseconds; what it raises is logged.
    """

    def __init__(self, timeouts: Timeouts, interrupted: Callable[[str], None], logfile: str = "") -> None:
        self.period_s = math.inf
        self._timeouts = timeouts
        self._soft_s = timeouts.soft_timeout.total_seconds()
        self._hard_s = timeouts.hard_timeout.total_seconds()
        self._grace_s = timeouts.termination_grace_time.total_seconds()
        interval_s = timeouts.progress_watchdog_interval.total_seconds()
        self._period_s = min(interval_s or math.inf, self._soft_s / _STAMPS_PER_TIMEOUT)
        self._interrupted = interrupted
        self._link = process.start()
        self._phases: tuple[tuple[messages.Guard, int], ...] = ((self._message_of(WrapperPhase.OVER), monotonic_ns()),)
        """The last restart (or the time before the call), then when the function was called, and what became of it."""
        self._lock = threading.Lock()
        self._restarter: tuple[Restarter, int] | None = None
        self._pinged_ns = self._ping_sent_ns = 0
        self._log_to: tuple[LogTo, int] | None = None
        if logfile:
            self._log_to = (LogTo(logfile), monotonic_ns())
            self._send(*self._log_to)

    # Called by the wrapper.

    def running(self) -> None:
        """Reports that the function runs, or the callbacks before it: progress is expected from now on.

        A new call begins, and sections of a former one are closed.
        """
        now_ns, self._pinged_ns = monotonic_ns(), 0
        RankMonitorClient.call_began(now_ns)
        self.period_s = self._period_s
        self._say(self._message_of(WrapperPhase.RUNNING), now_ns)

    def unguarded(self) -> None:
        """Reports that the function runs on, and that no progress is expected."""
        self._say(self._message_of(WrapperPhase.UNGUARDED), monotonic_ns(), only_in=(WrapperPhase.RUNNING,))

    def guarded_again(self) -> None:
        """Reports that progress is expected again, after `unguarded`; nothing where the call was interrupted since."""
        self._say(self._message_of(WrapperPhase.RUNNING), monotonic_ns(), only_in=(WrapperPhase.UNGUARDED,))

    def ending(self) -> None:
        """Reports that the function was interrupted, and must end. Called in the watcher's thread.

        A loop that swallows the interruption executes bytecode, so nothing else would show that it does not end. A
        cleanup may take its grace, and is interrupted again after it: a longer one than the default has the same time.
        """
        limit_s = max(self._hard_s, self.interrupt_grace_s() + self._hard_s - self._soft_s)
        message = self._message_of_end("the function after its interruption", limit_s)
        self._say(message, monotonic_ns(), only_in=(WrapperPhase.RUNNING, WrapperPhase.UNGUARDED))

    def fault_seen(self) -> None:
        """Excludes intervals from now on from learned limits, before an interruption. From any thread."""
        client = RankMonitorClient.active
        if client is not None:
            client.stop_learning()

    def calling(self, callback: str, limit_s: float | None = None) -> None:
        """Reports that a callback runs outside of the function.

        Args:
            callback: its name, for the verdict where it does not end in time.
            limit_s: seconds within which it must end; None, or fewer than `hard_timeout`: `hard_timeout`.
        """
        self.fault_seen()
        self._say(self._message_of_end(callback, max(self._hard_s, limit_s or 0.0)), monotonic_ns())

    def restarting(self) -> None:
        """Reports that the wrapper restarts: nothing is judged."""
        self.fault_seen()
        self._say(self._message_of(WrapperPhase.RESTARTING), monotonic_ns())

    def over(self) -> None:
        """Reports that the call ended: the rank is watched as before it."""
        self.period_s, now_ns = math.inf, monotonic_ns()
        client = RankMonitorClient.active
        if client is not None:
            client.learn_again(now_ns)
        self._say(self._message_of(WrapperPhase.OVER), now_ns)

    def ping(self) -> None:
        """Notes progress of the function; the watchdog sends it with its stamps."""
        self._pinged_ns = monotonic_ns()

    def report(
        self, state: WrapperState, member: int, iteration: int, prefix: str, limit_s: float, reason: str = ""
    ) -> None:
        """Reports the wrapper's state to the node's agent; the arguments are those of `Restarter`."""
        now_ns = monotonic_ns()
        self._restarter = Restarter(state, member, iteration, prefix, limit_s, reason), now_ns
        self._send(self._restarter[0], now_ns)

    def interrupted_again(self, iteration: int, waited_s: float, why: str, stack: str) -> None:
        """Reports that the function was interrupted again; arguments as of `InterruptedAgain`. From any thread."""
        self._send(InterruptedAgain(iteration, round(waited_s, 3), why, stack[-_MAX_STACK:]), monotonic_ns())

    def interrupt_grace_s(self) -> float:
        """How long the cleanup of an interrupted function may take, in seconds: the wrapper's, or the launcher's."""
        of_launcher = None
        if self._link is not None and self._link.settings is not None:
            of_launcher = self._link.settings.interrupt_grace
        return self._timeouts.interrupt_grace_s(of_launcher)

    @property
    def has_pinged(self) -> bool:
        """Whether the function has called `ping()` in its present call."""
        return self._pinged_ns > 0

    # Called by the link and the watchdog.

    def tick(self) -> None:
        """Sends the last ping, if it was not sent."""
        pinged_ns, link = self._pinged_ns, self._link
        if pinged_ns > self._ping_sent_ns and link is not None and link.post(Ping(), pinged_ns):
            self._ping_sent_ns = pinged_ns

    def state(self) -> list[tuple[Message, int]]:
        """The whole state of the wrapper for a monitor; the phases after stamp and ping, by which it judges them."""
        link, pinged_ns = self._link, self._pinged_ns
        progress: list[tuple[Message, int]] = []
        if link is not None and link.stamp_ns is not None:
            progress.append((Progress(link.stamp_ns), monotonic_ns()))
        if pinged_ns:
            progress.append((Ping(), pinged_ns))
        states = (self._log_to, *progress, *self._phases, self._restarter)
        return [state for state in states if state is not None]

    def asked(self, message: InterruptAsked, sent_ns: int) -> None:
        """Handles the monitor's request to restart; a request from before the present call is ignored."""
        if self._phase not in (WrapperPhase.RUNNING, WrapperPhase.UNGUARDED) or sent_ns < self._phases[1][1]:
            return
        try:
            self.fault_seen()
            self._interrupted(message.reason)
        except Exception:
            logger.exception("the restart that the monitor asked for was not begun")

    # Within.

    @property
    def _phase(self) -> str:
        return self._phases[-1][0].phase

    def _say(self, message: messages.Guard, now_ns: int, only_in: Collection[str] = tuple(WrapperPhase)) -> None:
        """Sends a phase, in the phases `only_in`. The earlier phases of the call are kept, so that a new monitor also
        gets when it began. The watcher's thread calls it as well, when it interrupts the function."""
        with self._lock:
            if self._phase not in only_in:
                return
            before = {WrapperPhase.RUNNING: self._phases, WrapperPhase.UNGUARDED: self._phases[:2]}
            self._phases = (*before.get(WrapperPhase(message.phase), ()), (message, now_ns))
            self._send(message, now_ns)

    def _message_of_end(self, what: str, limit_s: float) -> messages.Guard:
        return messages.Guard(WrapperPhase.FINALIZING, self._soft_s, limit_s, self._grace_s, what)

    def _message_of(self, phase: WrapperPhase) -> messages.Guard:
        return messages.Guard(phase, self._soft_s, self._hard_s, self._grace_s)

    def _send(self, message: Message, now_ns: int) -> None:
        link = self._link
        if link is not None and not link.closed:
            link.wrapper_link = self
            link.post(message, now_ns, _SEND_TIMEOUT_S)
