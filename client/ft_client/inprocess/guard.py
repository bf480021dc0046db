"""What the wrapper tells this rank's monitor, and hears from it. Without a monitor nothing is told.

Knows the link and the wrapper's durations; of iterations and stores only what it passes on. The wrapper calls it in the
main thread, the watchdog in its own: what both use is replaced as a whole, never changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from time import monotonic_ns

from ft_client import process
from ft_client.inprocess.timeouts import Timeouts
from ft_client.rank_monitor_client import RankMonitorClient
from rank_monitor.contract import messages
from rank_monitor.contract.messages import InterruptAsked, InterruptedAgain, LogTo, Message, Ping, Progress, Restarter

logger = logging.getLogger(__name__)

_RUNNING, _UNGUARDED, _FINALIZING, _RESTARTING, _OVER = "running", "unguarded", "finalizing", "restarting", "over"
_PATIENCE_S = 0.1
_MAX_STACK = 4096
_STAMPS_PER_TIMEOUT = 8  # a stamp may be two periods old before its lack means anything


class Guard:
    """The guard of one call of the wrapped function.

    Args:
        timeouts: the wrapper's.
        logfile: where the monitor writes what it sees; empty: nowhere.
        interrupted: called with the reason, in the watchdog's thread, when the monitor asks for a restart: the function
            made no progress. May take milliseconds; what it raises is logged.
    """

    def __init__(self, timeouts: Timeouts, interrupted: Callable[[str], None], logfile: str = "") -> None:
        self.period_s = math.inf
        self._soft_s = timeouts.soft_timeout.total_seconds()
        self._hard_s = timeouts.hard_timeout.total_seconds()
        self._grace_s = timeouts.termination_grace_time.total_seconds()
        interval_s = timeouts.progress_watchdog_interval.total_seconds()
        self._period_s = min(interval_s or math.inf, self._soft_s / _STAMPS_PER_TIMEOUT)
        self._interrupted = interrupted
        self._link = process.start()
        self._phases: tuple[tuple[messages.Guard, int], ...] = ((self._guard(_OVER), monotonic_ns()),)
        """The last restart (or the time before the call), then when the function was called, and what became of it."""
        self._restarter: tuple[Restarter, int] | None = None
        self._pinged_ns = self._ping_sent_ns = 0
        self._log_to = (LogTo(logfile), monotonic_ns()) if logfile else None
        if self._log_to is not None:
            self._send(*self._log_to)

    # Called by the wrapper.

    def running(self) -> None:
        """The function runs, or what the wrapper calls before it: progress is expected from now on.

        After `unguarded` it goes on; otherwise it is called anew, and what a former call left open is closed.
        """
        if self._phase == _RUNNING:
            return
        goes_on, now_ns = self._phase == _UNGUARDED, monotonic_ns()
        if not goes_on:
            self._pinged_ns = 0
            RankMonitorClient.call_began(now_ns)
        self.period_s = self._period_s
        self._say(_RUNNING, now_ns)

    def unguarded(self) -> None:
        """The function runs on, and owes no progress."""
        if self._phase == _RUNNING:
            self._say(_UNGUARDED, monotonic_ns())

    def fault_seen(self) -> None:
        """The function is about to be interrupted: what ends from now on teaches no limit. From any thread."""
        if (client := RankMonitorClient.active) is not None:
            client.stop_learning()

    def finalizing(self) -> None:
        """The function has ended after a fault, and what the user has called then runs: it must end in time."""
        self._say(_FINALIZING, monotonic_ns())

    def restarting(self) -> None:
        """The wrapper is at work: nothing is judged."""
        self.fault_seen()
        self._say(_RESTARTING, monotonic_ns())

    def over(self) -> None:
        """The call ended: the rank is watched as before it."""
        self.period_s, now_ns = math.inf, monotonic_ns()
        if (client := RankMonitorClient.active) is not None:
            client.learn_again(now_ns)
        self._say(_OVER, now_ns)

    def ping(self) -> None:
        """The function reports progress; the watchdog passes it on with its stamps."""
        self._pinged_ns = monotonic_ns()

    def report(self, state: str, member: int, iteration: int, prefix: str, limit_s: float, reason: str = "") -> None:
        """Tells the node's agent what the wrapper does; the arguments are `Restarter`'s."""
        now_ns = monotonic_ns()
        self._restarter = Restarter(state, member, iteration, prefix, limit_s, reason), now_ns
        self._send(self._restarter[0], now_ns)

    def interrupted_again(self, iteration: int, waited_s: float, why: str, stack: str) -> None:
        """Tells that the function was interrupted again; the arguments are `InterruptedAgain`'s. From any thread."""
        self._send(InterruptedAgain(iteration, round(waited_s, 3), why, stack[-_MAX_STACK:]), monotonic_ns())

    def interrupt_grace_s(self) -> float | None:
        """What the launcher says of it; None: nothing."""
        settings = self._link.settings if self._link is not None else None
        return settings.interrupt_grace if settings is not None else None

    @property
    def has_pinged(self) -> bool:
        """Whether the function, as it was called last, has called `ping()`."""
        return self._pinged_ns > 0

    # Called by the link and the watchdog.

    def tick(self) -> None:
        """Passes on the last ping."""
        pinged_ns, link = self._pinged_ns, self._link
        if pinged_ns > self._ping_sent_ns and link is not None and link.post(Ping(), pinged_ns):
            self._ping_sent_ns = pinged_ns

    def state(self) -> list[tuple[Message, int]]:
        """All that a monitor must know; the guard after what it judges by."""
        link, pinged_ns, told = self._link, self._pinged_ns, list[tuple[Message, int]]()
        if link is not None and link.stamp_ns is not None:
            told.append((Progress(link.stamp_ns), monotonic_ns()))
        if pinged_ns:
            told.append((Ping(), pinged_ns))
        first = [self._log_to] if self._log_to is not None else []
        return [*first, *told, *self._phases, *([self._restarter] if self._restarter else [])]

    def asked(self, message: InterruptAsked, sent_ns: int) -> None:
        """The monitor asks for a restart; one that was asked of an earlier call is none of this one's."""
        if self._phase not in (_RUNNING, _UNGUARDED) or sent_ns < self._phases[1][1]:
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

    def _say(self, phase: str, now_ns: int) -> None:
        """Whoever is told all of it again learns when the call began, too: hence the phases before."""
        before = {_RUNNING: self._phases, _UNGUARDED: self._phases[:2]}.get(phase, ())
        said = self._guard(phase)
        self._phases = (*before, (said, now_ns))
        self._send(said, now_ns)

    def _guard(self, phase: str) -> messages.Guard:
        return messages.Guard(phase, self._soft_s, self._hard_s, self._grace_s)

    def _send(self, message: Message, now_ns: int) -> None:
        link = self._link
        if link is not None and not link.closed:
            link.guardian = self
            link.post(message, now_ns, _PATIENCE_S)
