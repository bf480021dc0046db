"""Connects the wrapper with this rank's monitor: reports the phase of the restart machine, and receives the monitor's
requests to restart. `wrapper.py` makes one for each call of a wrapped function, and `call.py` uses it.

Without a monitor nothing is sent. Rounds and stores are not interpreted here. The wrapper calls it in the main
thread, the watchdog in its own: objects that both use are replaced as a whole and never changed.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from time import monotonic_ns

from ft_client.inprocess.arguments import Timeouts
from ft_client.rank.monitoring import process
from ft_client.rank_monitor_client import RankMonitorClient
from rank_monitor.contract.restart_phase import RestartPhase
from rank_monitor.contract.wire.messages import (
    InterruptAsked,
    InterruptedAgain,
    LogTo,
    Message,
    Ping,
    Progress,
    RestartReport,
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
        interrupted: called with the reason, in the watchdog's thread, when the monitor asks for a restart: the function
            made no progress. May take milliseconds; what it raises is logged.
        member: this rank at entry of the call.
        prefix: of the keys of the call, where the launcher can reach them; else empty.
        logfile: where the monitor also writes its log; empty: nowhere.
    """

    def __init__(
        self,
        timeouts: Timeouts,
        interrupted: Callable[[str], None],
        member: int = 0,
        prefix: str = "",
        logfile: str = "",
    ) -> None:
        self.period_s = math.inf
        self._timeouts = timeouts
        self._soft_s = timeouts.soft_timeout.total_seconds()
        self._hard_s = timeouts.hard_timeout.total_seconds()
        interval_s = timeouts.progress_watchdog_interval.total_seconds()
        self._period_s = min(interval_s or math.inf, self._soft_s / _STAMPS_PER_TIMEOUT)
        self._interrupted = interrupted
        self._link = process.start()
        report = RestartReport(
            phase=RestartPhase.NONE,
            round=0,
            began_ns=0,
            is_timed=True,
            soft_timeout_s=self._soft_s,
            hard_timeout_s=self._hard_s,
            grace_s=timeouts.termination_grace_time.total_seconds(),
            entry_rank=member,
            call_prefix=prefix,
            limit_s=timeouts.restart_limit_s,
        )
        self._last: tuple[RestartReport, int] = report, monotonic_ns()
        """The last report, with the moment at which its phase began."""
        self._lock = threading.Lock()
        self._pinged_ns = self._ping_sent_ns = 0
        self._log_to: tuple[LogTo, int] | None = None
        if logfile:
            self._log_to = (LogTo(logfile), monotonic_ns())
            self._send(*self._log_to)

    # Called by the wrapper.

    def report(self, phase: RestartPhase, number: int, limit_s: float = 0.0) -> None:
        """Reports that another phase of the call begins, outside of the function, in or before round `number`.

        Args:
            limit_s: seconds within which a callback must end; fewer than `hard_timeout`: `hard_timeout`.
        """
        self.fault_seen()
        with self._lock:
            self._say(phase, number, hard_s=max(self._hard_s, limit_s))

    def running(self, number: int) -> None:
        """Reports that the function runs in round `number`, or the callbacks before it: progress is expected.

        A new call begins, and sections of an earlier one are closed.
        """
        now_ns, self._pinged_ns = monotonic_ns(), 0
        RankMonitorClient.call_began(now_ns)
        self.period_s = self._period_s
        with self._lock:
            self._say(RestartPhase.RUNNING, number, now_ns)

    def expect_progress(self, is_timed: bool) -> None:
        """Reports whether progress of the function is expected from now on.

        Nothing is sent where that is so already, or where the function does not run any more: it was interrupted.
        """
        with self._lock:
            report = self._last[0]
            if report.phase is RestartPhase.RUNNING and report.is_timed is not is_timed:
                self._post(replace(report, is_timed=is_timed), monotonic_ns())

    def interrupting(self) -> None:
        """Reports that the function was interrupted, and must end. Called in the watcher's thread.

        A loop that swallows the interruption executes bytecode, so nothing else would show that it does not end. A
        cleanup may take its grace, and is interrupted again after it: a longer one than the default has the same time.
        """
        limit_s = max(self._hard_s, self.interrupt_grace_s() + self._hard_s - self._soft_s)
        with self._lock:
            report = self._last[0]
            if report.phase is RestartPhase.RUNNING:
                self._say(RestartPhase.INTERRUPTING, report.round, hard_s=limit_s)

    def fault_seen(self) -> None:
        """Excludes intervals from now on from learned limits, before an interruption. From any thread."""
        client = RankMonitorClient.active
        if client is not None:
            client.stop_learning()

    def over(self, phase: RestartPhase, number: int, reason: str = "") -> None:
        """Reports that the call ended: the rank is watched as before it.

        Args:
            phase: how: DONE, LEFT, GAVE_UP, or NONE where an exception ends it.
            reason: why this rank gives up.
        """
        self.period_s, now_ns = math.inf, monotonic_ns()
        client = RankMonitorClient.active
        if client is not None:
            client.learn_again(now_ns)
        with self._lock:
            self._say(phase, number, now_ns, reason=reason)

    def ping(self) -> None:
        """Notes progress of the function; the watchdog sends it with its stamps."""
        self._pinged_ns = monotonic_ns()

    def interrupted_again(self, number: int, waited_s: float, why: str, stack: str) -> None:
        """Reports that the function was interrupted again; arguments as of `InterruptedAgain`. From any thread."""
        self._send(InterruptedAgain(number, round(waited_s, 3), why, stack[-_MAX_STACK:]), monotonic_ns())

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

    @property
    def restart(self) -> RestartReport | None:
        """The last report; None: no call has begun."""
        report = self._last[0]
        if report.phase is RestartPhase.NONE:
            return None
        return report

    def state(self) -> list[tuple[Message, int]]:
        """The whole state of the wrapper for a monitor; the report after stamp and ping, which it judges by."""
        link, pinged_ns = self._link, self._pinged_ns
        report, since_ns = self._last
        states: list[tuple[Message, int]] = []
        if self._log_to is not None:
            states.append(self._log_to)
        if link is not None and link.stamp_ns is not None:
            states.append((Progress(link.stamp_ns), monotonic_ns()))
        if pinged_ns:
            states.append((Ping(), pinged_ns))
        if report.phase is not RestartPhase.NONE:
            states.append((report, since_ns))
        return states

    def on_interrupt_asked(self, message: InterruptAsked, sent_ns: int) -> None:
        """Handles the monitor's request to restart; a request from before the present call is ignored."""
        report = self._last[0]
        if report.phase is not RestartPhase.RUNNING or sent_ns < report.began_ns:
            return
        try:
            self.fault_seen()
            self._interrupted(message.reason)
        except Exception:
            logger.exception("the restart that the monitor asked for was not begun")

    # Within.

    def _say(self, phase: RestartPhase, number: int, now_ns: int = 0, hard_s: float = 0.0, reason: str = "") -> None:
        """Begins a phase and reports it. Called with the lock held: the watcher's thread does so as well.

        Args:
            now_ns: the moment; 0: now.
            hard_s: what the phase has in the place of `hard_timeout`; 0: that.
        """
        now_ns = now_ns or monotonic_ns()
        report = replace(
            self._last[0],
            phase=phase,
            round=number,
            began_ns=now_ns,
            is_timed=True,
            hard_timeout_s=hard_s or self._hard_s,
            reason=reason,
        )
        self._post(report, now_ns)

    def _post(self, report: RestartReport, since_ns: int) -> None:
        self._last = report, since_ns
        self._send(report, since_ns)

    def _send(self, message: Message, now_ns: int) -> None:
        link = self._link
        if link is not None and not link.closed:
            link.wrapper_link = self
            link.post(message, now_ns, _SEND_TIMEOUT_S)
