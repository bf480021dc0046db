"""Connects the wrapper with this rank's monitor: reports the phase of the restart machine, and receives the monitor's
requests to restart.

`wrapper.py` makes one `MonitorLink` for each call of a wrapped function. `call.py` reports by it; the rank's link to
the monitor (`rank/monitoring/link.py`) and the watchdog call it back. Without a monitor nothing is sent. Rounds and
stores are not interpreted here.

A report is a `RestartReport`: the whole state of this rank's restart, not a change. So a monitor that was replaced, or
a connection that was lost, needs only the last report, with the moment at which its phase began.

Threads: the main thread reports phases; the watcher's thread calls `interrupting`, `fault_seen` and
`interrupted_again`; the watchdog's thread calls `tick`, `state` and `on_interrupt_asked`. For each request of the
monitor one more thread calls `interrupted`. `_lock` is held while a report replaces the last one. The objects that
several threads read are replaced as a whole and never changed.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import monotonic_ns

from ft_client.inprocess.arguments import Timeouts
from ft_client.rank.monitoring import hidden_thread, process
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

_SEND_TIMEOUT_S = 0.1
"""A monitor that does not read must not hold up a restart. The rank's link repeats what the monitor missed."""
_MAX_STACK = 4096
"""Characters of a stack, its innermost frames: in JSON at most 24,576 bytes, so that a stack fits into one message."""
_STAMPS_PER_TIMEOUT = 8
"""Stamps of the main thread within one `soft_timeout`. A stamp may be two periods old although the main thread runs:
that is a quarter of the timeout at most."""


class MonitorLink:
    """The connection of one call of the wrapped function with the monitor.

    Args:
        timeouts: the wrapper's durations.
        interrupted: called with the reason, in a thread of its own, when the monitor asks for a restart: the function
            made no progress. What it raises is logged.
        entry_rank: the number of this rank at entry of the call.
        call_prefix: the prefix of the keys of the call, where the launcher can reach them; else empty.
        logfile: a file into which the monitor also writes its log; empty: none.

    `period_s`: seconds between two stamps of the main thread that the watchdog sends; infinite while no call runs.
    """

    def __init__(
        self,
        timeouts: Timeouts,
        interrupted: Callable[[str], None],
        entry_rank: int = 0,
        call_prefix: str = "",
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
            entry_rank=entry_rank,
            call_prefix=call_prefix,
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
        """Reports that another phase of the call begins, outside of the function. Waits 0.1 s at most.

        Args:
            phase: the phase that begins now.
            number: the round that this rank is in, or on its way to.
            limit_s: seconds within which a callback must end. `hard_timeout` where that is longer.
        """
        self.fault_seen()
        with self._lock:
            self._say(phase, number, hard_s=max(self._hard_s, limit_s))

    def running(self, number: int) -> None:
        """Reports that the function runs in round `number`, or the callbacks before it: progress is expected from now.

        Sections that an earlier round left open are closed: the interruption may have come inside of one.
        """
        now_ns, self._pinged_ns = monotonic_ns(), 0
        RankMonitorClient.call_began(now_ns)
        self.period_s = self._period_s
        with self._lock:
            self._say(RestartPhase.RUNNING, number, now_ns)

    def expect_progress(self, is_timed: bool) -> None:
        """Reports whether progress of the function is expected from now on (`CallWrapper.disable_hang_protection`).

        Nothing is sent where the last report says the same, or where the function was interrupted: progress is not
        what the monitor judges then.
        """
        with self._lock:
            report = self._last[0]
            if report.phase is RestartPhase.RUNNING and report.is_timed is not is_timed:
                self._post(replace(report, is_timed=is_timed), monotonic_ns())

    def interrupting(self) -> None:
        """Reports that the function was interrupted, and must end. Called in the watcher's thread.

        From here on the monitor judges by a limit and no more by progress: a loop that swallows the interruption
        executes bytecode, so that progress would not show that the loop never ends. The limit is `hard_timeout`, or, if
        that is longer, `interrupt_grace` and then the time between `soft_timeout` and `hard_timeout`.
        """
        limit_s = max(self._hard_s, self.interrupt_grace_s() + self._hard_s - self._soft_s)
        with self._lock:
            report = self._last[0]
            if report.phase is RestartPhase.RUNNING:
                self._say(RestartPhase.INTERRUPTING, report.round, hard_s=limit_s)

    def fault_seen(self) -> None:
        """Excludes intervals from now on from learned limits. Called before an interruption, from any thread.

        An interval that a fault on another rank stretched would teach the client a limit that is too long.
        """
        client = RankMonitorClient.active
        if client is not None:
            client.stop_learning()

    def over(self, phase: RestartPhase, number: int, reason: str = "") -> None:
        """Reports that the call ended: the monitor watches the rank as it did before the call.

        Args:
            phase: how the call ended: DONE, LEFT, GAVE_UP, or NONE where `completion` raised.
            number: the last round.
            reason: why this rank gives up; empty where it does not.
        """
        self.period_s, now_ns = math.inf, monotonic_ns()
        client = RankMonitorClient.active
        if client is not None:
            client.learn_again(now_ns)
        with self._lock:
            self._say(phase, number, now_ns, reason=reason)

    def ping(self) -> None:
        """Notes progress of the function. The watchdog sends it with its next stamp, so this costs no system call."""
        self._pinged_ns = monotonic_ns()

    def interrupted_again(self, number: int, waited_s: float, reason: str, stack: str) -> None:
        """Reports that the function was interrupted again, for the journal. From any thread.

        Args:
            number: the round.
            waited_s: seconds since the interruption before.
            reason: what held the interruption back: the cleanup that it may now cut off.
            stack: where the main thread is.
        """
        self._send(InterruptedAgain(number, round(waited_s, 3), reason, stack[-_MAX_STACK:]), monotonic_ns())

    def interrupt_grace_s(self) -> float:
        """Returns how long the cleanup of an interrupted function may take, in seconds.

        The wrapper's `interrupt_grace`, else the launcher's `--ft-interrupt-grace`, else half the time between
        `soft_timeout` and `hard_timeout`. Asked anew at each interruption: the launcher's settings arrive with the
        monitor's answer, after this object was made.
        """
        of_launcher = None
        if self._link is not None and self._link.settings is not None:
            of_launcher = self._link.settings.interrupt_grace
        return self._timeouts.interrupt_grace_s(of_launcher)

    @property
    def has_pinged(self) -> bool:
        """Whether the function has called `ping()` in the present round."""
        return self._pinged_ns > 0

    # Called by the link and the watchdog.

    def tick(self) -> None:
        """Sends the last ping, unless it was sent. Called in the watchdog's thread at each stamp."""
        pinged_ns, link = self._pinged_ns, self._link
        if pinged_ns > self._ping_sent_ns and link is not None and link.post(Ping(), pinged_ns):
            self._ping_sent_ns = pinged_ns

    @property
    def restart(self) -> RestartReport | None:
        """The last report, for the first message of a new connection (`Hello`); None: no phase was reported yet."""
        report = self._last[0]
        if report.phase is RestartPhase.NONE:
            return None
        return report

    def state(self) -> list[tuple[Message, int]]:
        """Returns the whole state of the wrapper, for a monitor that knows nothing: messages with their moments.

        The report comes after stamp and ping: the monitor judges by stamp and ping as soon as it has the report.
        """
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
        """Handles the monitor's request to restart. Called in the watchdog's thread; does not block.

        A request that was sent before the present round began is ignored: it is about the round before, which has ended
        meanwhile. The restart is begun in a thread of its own: what begins it logs, which a hidden thread must not do
        (`hidden_thread.py`), and waits for the answers of the ranks' store, while the watchdog goes on.
        """
        report = self._last[0]
        if report.phase is not RestartPhase.RUNNING or sent_ns < report.began_ns:
            return
        self.fault_seen()
        hidden_thread.run_in_ordinary(
            partial(self._interrupt, message.reason, report.began_ns), "ft_client soft timeout"
        )

    # Within.

    def _interrupt(self, reason: str, began_ns: int) -> None:
        """Begins the restart that the monitor asked for. The function of a thread.

        Args:
            reason: the limit that was exceeded, in words.
            began_ns: when the round began that the request is about. If the function has ended before this thread ran,
                nothing is interrupted: the next round may run by now.
        """
        if self._last[0].began_ns != began_ns:
            return
        try:
            self._interrupted(reason)
        except Exception:
            logger.exception("the restart that the monitor asked for was not begun")

    def _say(self, phase: RestartPhase, number: int, now_ns: int = 0, hard_s: float = 0.0, reason: str = "") -> None:
        """Begins a phase and reports it. Called with `_lock` held: main thread and watcher's thread both come here.

        Args:
            now_ns: the moment at which the phase began; 0: now.
            hard_s: the limit of the phase in seconds, in the place of `hard_timeout`; 0.0: `hard_timeout`.
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
        """Keeps the report, then sends it: after a reconnection, the link repeats what is kept here."""
        self._last = report, since_ns
        self._send(report, since_ns)

    def _send(self, message: Message, now_ns: int) -> None:
        """Sends a message, if there is a monitor. Also makes this object the one that the link calls back."""
        link = self._link
        if link is not None and not link.closed:
            link.wrapper_link = self
            link.post(message, now_ns, _SEND_TIMEOUT_S)
