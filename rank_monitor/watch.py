"""The known facts of one rank in one cycle, and the deadlines that follow from them. Pure.

`hang_detector.py` passes messages in (`note` and the methods beside it) and asks for deadlines (`first_deadline`,
`stall`, `check_at_ns`). Alarms and actions are there, and are not known here. Parts with a noun of their own have a
file: the rank's in-process wrapper (`watched_wrapper.py`), look-ups of names (`look_ups.py`), a standstill
(`standstill.py`), the account of the rank's time (`time_ledger.py`).

Moments are monotonic nanoseconds of the rank. A rank may send any number as a moment, so each is limited to the time
from the start of the cycle to the monitor's present: a moment in the future would postpone a deadline for ever.

**Which deadlines are in force** depends on how far the rank is:

- not yet watched: `connect`, until the program calls `init_workload_monitoring()`;
- watched: `initial` until the first sign of life, then `subsequent`; one for each open section, or `out_of_section`;
  and `reconnect` while the connection is lost;
- after `shutdown_workload_monitoring()`: `teardown`;
- in an in-process wrapper, beside these: `soft_timeout` while the function runs, `hard_timeout` alone while a callback
  runs, and none at all while the rank waits for other ranks;
- `log` and `hang`, which the launcher finds and the monitor only carries out.
"""

from __future__ import annotations

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.restart_phase import Judged
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.json_record import from_json
from rank_monitor.contract.wire.launcher_messages import HANG, STALL, CycleStart, HangOverdue, LogOverdue, LogStep
from rank_monitor.contract.wire.messages import (
    NO_ITERATION,
    Attach,
    Detach,
    Heartbeat,
    Hello,
    IterationReached,
    LimitsSet,
    Message,
    Ping,
    Progress,
    RestartReport,
    Sections,
)
from rank_monitor.contract.wire.rank_times import STEP, RankTimes, rank_times
from rank_monitor.limits import HARD, LOG, NS_PER_S, SECTION, SOFT, Deadline, WatchLimits, nanoseconds
from rank_monitor.look_ups import LookUps
from rank_monitor.standstill import Standstill
from rank_monitor.time_ledger import TimeLedger
from rank_monitor.watched_wrapper import WatchedWrapper

WARMUP = "warmup"
"""The name in `rank_section_timeouts` whose limit judges section `step` in the first steps."""
_UNUSUAL_FACTOR = 20
"""A stall is reported when it exceeds the usual time between two collectives by this factor. An evaluation or a
checkpoint that takes as long as some steps is no stall."""
_MAX_PAUSES = 64
"""Pauses that are kept, the latest ones: each deadline sums over all of them."""


class RankWatch:
    """The facts of one cycle of one rank.

    Args:
        settings: limits and counts as configured.
        start: how the cycle began; None between two cycles, when nothing is judged.
        now_ns: when the monitor was notified of the start.

    Raises:
        ProtocolError: `start` carries invalid limits.
    """

    def __init__(self, settings: MonitorSettings, start: CycleStart | None, now_ns: int) -> None:
        self._settings = settings
        self.start = start
        self.limits = WatchLimits.configured(settings)
        if start is not None and start.limits is not None:
            self.limits = WatchLimits.of_message(from_json(LimitsSet, start.limits))
        # `ended`: nothing is judged now, until another process of the rank sends a hello. `_over`: the launcher has
        # ended the cycle, and a hello changes nothing.
        self.ended = self._over = start is None
        # A monitor that replaces a lost one takes over a rank that runs already (`CycleStart.reconnect`).
        is_replaced = start is not None and start.reconnect
        self.attached = is_replaced and start is not None and start.attached
        self.detached = False
        self.connected = False
        self.client_pid = 0
        self.lost_ns = now_ns
        self.last_sign_ns: int | None = None
        """The last heartbeat, section or iteration, or the beginning of the watch; None: neither is known."""
        self.got_first_sign = False
        self.iteration = NO_ITERATION
        self.sections: dict[str, int] = {}
        """The open sections, each with the moment of its opening."""
        self.wrapper = WatchedWrapper()
        self._connect_armed = not is_replaced
        """Whether `connect_timeout` still holds: until the rank is watched for the first time."""
        if start is None:
            self._connect_since_ns = 0
        else:
            self._connect_since_ns = start.started_ns
        self._out_since_ns: int | None = None
        """Since when no section is open, as far as is known."""
        self._out_reported = False
        """Whether the rank itself has reported its sections on this connection."""
        self._detached_ns = 0
        self._warmup_steps = settings.num_warmup_iterations
        self._steps = 0
        self._last_step_ns = -1
        self._stamp_ns: int | None = None
        """When the main thread last executed bytecode; None: the rank sends no stamps."""
        self._warned = False
        """Whether the present stall was reported."""
        self.usual_gap_s: float | None = None
        """The usual time in seconds between two collectives, if it was asked for since the last stamp."""
        self.look_ups = LookUps()
        self._standstill = Standstill(settings.hang_timeout)
        self._hang_overdue: Deadline | None = None
        """The hang that the launcher has found; a deadline that has passed already."""
        self._log_silent_ns: int | None = None
        """Since when the rank has printed no step, where the launcher says that this is too long."""
        self._reports_iterations = False
        """Whether the training reports its iteration itself: then printed steps do not count."""
        self._pauses: list[tuple[int, int]] = []
        """Stretches in which the monitor or the machine stood still: from, until."""
        self.ledger = TimeLedger(_times_before(start))

    # Facts.

    def note(self, message: Message, sent_ns: int, now_ns: int) -> None:
        """Updates the facts from a message of the rank, or of the launcher about what it has found.

        Args:
            message: any other than `CycleStart` and `StopJudging`, for which the detector makes and ends a watch.
            sent_ns: when the message was sent, by the rank's clock.
            now_ns: the monitor's present.

        Raises:
            ProtocolError: the message sets invalid limits, or is a `RestartReport` with invalid numbers; nothing
                changed.
        """
        sent_ns = self._limited(sent_ns, now_ns)
        match message:
            case Heartbeat():
                self.heartbeat(sent_ns)
            case Sections():
                self._note_sections(message, sent_ns, now_ns)
            case IterationReached():
                self._reports_iterations = True
                self.iteration = message.iteration
                self.last_sign_ns = max(self.last_sign_ns or 0, sent_ns)
                self.ledger.iteration(message.iteration, sent_ns)
            case LogStep():
                self._note_log(message, now_ns)
            case LogOverdue():
                self._log_silent_ns = message.since_ns
            case HangOverdue():
                self._note_overdue(message, now_ns)
            case Progress():
                self._note_progress(self._limited(message.stamp_ns, now_ns), sent_ns)
            case Hello():
                self._note_hello(message, sent_ns, now_ns)
            case Attach():
                self._note_attach(message, sent_ns)
            case LimitsSet():
                self.limits = WatchLimits.of_message(message)
            case RestartReport():
                self._note_restart(message, sent_ns, now_ns)
                self._note_phase(sent_ns)
            case Ping():
                self.wrapper.ping(sent_ns)
            case Detach():
                self.attached, self.detached, self._detached_ns = False, True, sent_ns
                self._connect_armed = False
                self.ledger.detached(sent_ns)

    def heartbeat(self, sent_ns: int) -> None:
        """Notes a sign of life. `sent_ns` must not be in the future. A late one never sets the last sign back."""
        self.got_first_sign = True
        if self.last_sign_ns is None or sent_ns > self.last_sign_ns:
            self.last_sign_ns = sent_ns

    def lost(self, now_ns: int) -> None:
        """Notes that the connection closed while the rank lives: `reconnect` is in force from now on."""
        self.connected = False
        self.lost_ns = now_ns

    def exited(self, now_ns: int) -> None:
        """Notes that the rank's process ended: nothing is judged until another process of the rank sends a hello.

        Another process may come within the cycle: a script that the launcher started may start the training again.
        """
        self.ledger.exited(now_ns)
        self.ended, self.connected = True, False
        self.attached = self.detached = self._connect_armed = False
        self.wrapper = WatchedWrapper()

    def end(self) -> None:
        """Notes the end of the cycle. Nothing is judged until the next cycle, even if a process connects."""
        self.ended = self._over = True

    def pause(self, from_ns: int, until_ns: int) -> None:
        """Excludes a stretch in which the monitor or the machine stood still from every deadline that was running.

        Called by the detector alone, which knows when it should have been called.
        """
        self._pauses.append((from_ns, until_ns))
        del self._pauses[:-_MAX_PAUSES]
        self.ledger.pause(from_ns, until_ns)

    def stall_reported(self) -> None:
        """Notes that the present stall was reported. The next progress arms the warning again."""
        self._warned = True

    def _limited(self, moment_ns: int, now_ns: int) -> int:
        """Returns a moment that the rank sent, limited to the time from the start of the cycle to `now_ns`."""
        earliest_ns = 0
        if self.start is not None:
            earliest_ns = self.start.started_ns
        return min(max(moment_ns, earliest_ns), now_ns)

    def _note_sections(self, message: Sections, sent_ns: int, now_ns: int) -> None:
        """Notes the whole set of open sections. A report that was lost before makes no difference.

        A step counts when its opening is later than that of the last one: the set may name the same step again.
        """
        self.heartbeat(sent_ns)
        if message.iteration != NO_ITERATION:
            self._reports_iterations = True
            self.iteration = message.iteration
        now_open = {name: self._limited(since_ns, now_ns) for name, since_ns in message.open}
        if not now_open and (self.sections or not self._out_reported):
            self._out_since_ns = sent_ns
        self._out_reported = True
        self.sections = now_open
        if now_open.get(STEP, -1) > self._last_step_ns:
            self._last_step_ns = now_open[STEP]
            self._steps += 1
        self.ledger.sections(now_open, sent_ns, message.iteration)

    def _note_log(self, message: LogStep, now_ns: int) -> None:
        """Notes a step that the rank printed, as the launcher has read it (`--ft-watch-log`).

        What the training reports itself is more exact: then only the end of the silence is noted.
        """
        self._log_silent_ns = None
        if self._reports_iterations or self.start is None:
            return
        if message.iteration != NO_ITERATION:
            self.iteration = message.iteration
        at_ns, started_ns = self._limited(message.at_ns, now_ns), self.start.started_ns
        self._standstill.printed(at_ns)
        self.ledger.printed(message.iteration, message.steps, message.step_ns, at_ns, started_ns)

    def _note_restart(self, report: RestartReport, since_ns: int, now_ns: int) -> None:
        """Notes a report of the wrapper. `since_ns`: when its phase began.

        Where another call of the training's function began, what an earlier call left behind is discarded.

        Raises:
            ProtocolError: the values of the report make no sense; nothing changed.
        """
        self.wrapper.check(report)
        if self.wrapper.note(report, self._limited(report.began_ns, now_ns), since_ns):
            self._discard_earlier_call(self.wrapper.began_ns)

    def _note_phase(self, sent_ns: int) -> None:
        """Notes in the ledger what the wrapper does now, so that the time of a restart is not counted as training."""
        match self.wrapper.judged:
            case Judged.HARD:
                self.ledger.interrupted(sent_ns)
            case Judged.NOTHING:
                self.ledger.restarts(sent_ns)
            case Judged.SOFT:
                self.ledger.called(sent_ns)
            case Judged.AS_WITHOUT:
                self.ledger.returned(sent_ns)

    def _note_overdue(self, message: HangOverdue, now_ns: int) -> None:
        """Notes that the launcher has found a hang. The launcher counts pauses itself, so none is added here, and the
        deadline has passed already: the detector acts at once."""
        since_ns = now_ns - nanoseconds(message.waited_s)
        at_ns = min(now_ns, since_ns + nanoseconds(message.limit_s))
        self._hang_overdue = Deadline(HANG, message.limit_s, since_ns, at_ns, sign=message.reason)

    def _note_progress(self, stamp_ns: int, sent_ns: int) -> None:
        """Notes a stamp of the main thread. A newer one ends a stall; the same one again shows only that the process
        lives."""
        self._standstill.stamped(stamp_ns, sent_ns)
        if self._stamp_ns is None or stamp_ns > self._stamp_ns:
            self._stamp_ns = stamp_ns
            self._warned, self.usual_gap_s = False, None

    def _discard_earlier_call(self, now_ns: int) -> None:
        """Discards what the rank reported in an earlier call of the training's function, which is called again.

        Heartbeats and sections are judged again from the first one of this call. What is later than `now_ns`, the
        beginning of the call, stays: a reconnected rank may have reported its sections before its restart.
        """
        self.sections = {name: since_ns for name, since_ns in self.sections.items() if since_ns > now_ns}
        if self.last_sign_ns is not None and self.last_sign_ns <= now_ns:
            self.last_sign_ns, self.got_first_sign = None, False
        if self._out_since_ns is not None and self._out_since_ns <= now_ns:
            self._out_since_ns, self._out_reported = None, False
        if self.detached and self._detached_ns <= now_ns:
            self.detached = False
        self._connect_since_ns = now_ns
        self._hang_overdue = None

    def _note_hello(self, message: Hello, sent_ns: int, now_ns: int) -> None:
        """Notes that the rank has connected: for the first time, again after a loss, or as another process.

        What a hello says of the watch is the truth, with one exception: a process that is neither the started one nor
        the one that was connected before says nothing of the watch that another process had begun.
        """
        if message.restart is not None:
            self.wrapper.check(message.restart)
        self.ledger.begin(sent_ns)
        is_rank = self.start is not None and message.pid == self.start.rank_pid
        same_process = is_rank or message.pid == self.client_pid
        self.connected, self.client_pid, self.ended = True, message.pid, self._over
        self._set_warmup(message.num_warmup_iterations)
        if message.attached:
            self.attached, self.detached = True, False
            self.got_first_sign = message.got_first_sign
            self.last_sign_ns = self._limited(message.last_sign_ns, now_ns)
            self._connect_armed = False
        elif same_process:
            # Not watched, as it reports itself: it shut its watch down, or became another program (exec).
            self.attached = False
        elif self.attached and self.last_sign_ns is None:
            self.last_sign_ns = sent_ns
        if self._out_since_ns is None:
            self._out_since_ns = self.last_sign_ns
        # The next report of sections is the truth, with the moment since which it holds.
        self._out_reported = False
        if message.restart is None:
            self.wrapper.note_none()
        elif message.restart != self.wrapper.report:
            self._note_restart(message.restart, sent_ns, now_ns)

    def _note_attach(self, message: Attach, sent_ns: int) -> None:
        """Notes that the watch begins: `initial` runs from now on. A second watch in one process begins afresh."""
        self.ledger.attached(sent_ns, anew=self.attached or self.detached)
        if self.attached or self.detached:  # sections that are open are those of the watch before
            self.sections = {}
        self.attached, self.detached, self.got_first_sign = True, False, False
        self.last_sign_ns = sent_ns
        self._connect_armed = False
        if STEP in self.sections:
            self._steps = 1
        else:
            self._steps = 0
        self._set_warmup(message.num_warmup_iterations)
        if not self.sections:
            self._out_since_ns = sent_ns

    def _set_warmup(self, steps: int | None) -> None:
        if steps is not None:
            self._warmup_steps = steps

    # Deadlines.

    def first_deadline(self) -> Deadline | None:
        """Returns the earliest of all deadlines in force; None when nothing is judged."""
        in_force = map(self.look_ups.postponed, self._deadlines())
        return min(in_force, key=lambda deadline: deadline.at_ns, default=None)

    def stall(self) -> Deadline | None:
        """Returns the deadline of the stall warning; None if nothing is to be warned of.

        There is none without stamps of the main thread, without a connection, once the stall was reported, and while
        the rank waits for other ranks in a restart.
        """
        if self.ended or self.detached or self._warned or not self.connected or self._stamp_ns is None:
            return None
        limit_s = self._settings.stall_warning
        if limit_s is None or self.wrapper.judged is Judged.NOTHING:
            return None
        limit_s = max(limit_s, _UNUSUAL_FACTOR * (self.usual_gap_s or 0.0))
        (warning,) = self._deadline(STALL, limit_s, max(self._stamp_ns, self.wrapper.since_ns))
        return warning

    # What the launcher needs to find a hang (`hang_timeout`): a notice of each standstill, and ages for its snapshot.

    def check_at_ns(self) -> int | None:
        """Returns when the launcher is to be notified that the rank stands still; None: never, as far as is known."""
        if not self._shows_standstill:
            return None
        return self._standstill.check_at_ns(self.last_sign_ns, self.paused_since)

    def standstill_notified(self) -> None:
        """Notes that the launcher was notified of the present standstill."""
        self._standstill.notified(self.last_sign_ns)

    def idle_s(self, now_ns: int) -> float | None:
        """Returns the seconds since the last stamp or report of the rank, without pauses; None: the rank sends no
        stamps, or is in a state in which a standstill means nothing."""
        if not self._shows_standstill:
            return None
        return self._age_s(self._standstill.idle_since_ns(self.last_sign_ns), now_ns)

    def report_age_s(self, now_ns: int) -> float | None:
        """Returns the seconds since the rank's last heartbeat, section, iteration or printed step, without pauses;
        None: there was none."""
        return self._age_s(self._standstill.reported_ns(self.last_sign_ns), now_ns)

    @property
    def has_own_limit(self) -> bool:
        """Whether a section is open that has a limit of its own."""
        return self.attached and any(self._deadlines_of(name, since_ns) for name, since_ns in self.sections.items())

    @property
    def _shows_standstill(self) -> bool:
        """Whether a rank without stamps stands still. Not where it is to wait, or where no stamp could arrive."""
        if self.ended or self.detached or self.wrapper.judged is Judged.NOTHING:
            return False
        return self.connected

    def _age_s(self, since_ns: int | None, now_ns: int) -> float | None:
        if since_ns is None:
            return None
        return max(0, now_ns - since_ns - self.paused_since(since_ns)) / NS_PER_S

    def _deadlines(self) -> list[Deadline]:
        """Returns all deadlines in force; see the list at the top of this file."""
        if self.ended or self.start is None or self.wrapper.judged is Judged.NOTHING:
            return []
        if self.wrapper.judged is Judged.HARD:
            hard_s = self.wrapper.report.hard_timeout_s
            return self._deadline(HARD, hard_s, self.wrapper.since_ns, sign=self.wrapper.expected_end)
        # A process that could start no thread sends no stamp, so none is expected of it. A process that is cut off may
        # hang: that it sends nothing is no excuse.
        has_stamps = self._stamp_ns is not None or not self.connected
        soft_s = self.wrapper.report.soft_timeout_s
        found: list[Deadline] = []
        for sign, since_ns in self.wrapper.expected_signs(has_stamps, self._stamp_ns or 0):
            found += self._deadline(SOFT, soft_s, since_ns, sign=sign)
        if self.detached:
            found += self._deadline("teardown", self._settings.teardown_timeout, self._detached_ns)
        elif self.attached:
            found += self._connection_deadlines() + self._heartbeat_deadlines() + self._section_deadlines()
        elif self._connect_armed:
            found += self._deadline("connect", self._settings.connect_timeout, self._connect_since_ns)
        if not self.detached:
            found += self._log_deadlines()
        if self._hang_overdue is not None:
            found.append(self._hang_overdue)
        return found

    def _log_deadlines(self) -> list[Deadline]:
        """Returns the deadline of `watch_log_timeout`, if the launcher has reported a silence of this very call."""
        since_ns = self._log_silent_ns
        # An earlier silence is that of an earlier process of the rank, or of an earlier call of its function.
        if since_ns is None or self.start is None or since_ns < max(self.start.started_ns, self.wrapper.began_ns):
            return []
        return self._deadline(LOG, self._settings.watch_log_timeout, since_ns)

    def _connection_deadlines(self) -> list[Deadline]:
        """Returns the deadline for a watched rank to connect again: by `connect_timeout` from the loss on, or else by
        the largest limit from the last sign of life on, by which a silent rank would be judged anyway."""
        if self.connected:
            return []
        if self._settings.connect_timeout is not None or self.last_sign_ns is None:
            return self._deadline("reconnect", self._settings.connect_timeout or self.limits.largest, self.lost_ns)
        return self._deadline("reconnect", self.limits.largest, self.last_sign_ns)

    def _heartbeat_deadlines(self) -> list[Deadline]:
        if self.last_sign_ns is None:
            return []
        if self.got_first_sign:
            return self._deadline("subsequent", self.limits.subsequent, self.last_sign_ns)
        return self._deadline("initial", self.limits.initial, self.last_sign_ns)

    def _section_deadlines(self) -> list[Deadline]:
        if self.sections:
            return [found for name, since_ns in self.sections.items() for found in self._deadlines_of(name, since_ns)]
        if self._out_since_ns is None or not self.limits.any_section:
            return []
        return self._deadline("out_of_section", self.limits.out_of_section, self._out_since_ns)

    def _deadlines_of(self, name: str, since_ns: int) -> list[Deadline]:
        """Returns the deadline of an open section, if it has a limit.

        The first steps take longer than all others: they are judged by the limit of `warmup` if there is one, and never
        by a `step` limit that was learned.
        """
        by = name
        if name == STEP and self._steps <= self._warmup_steps:
            if self.limits.sections.get(WARMUP) is not None:
                by = WARMUP
            elif SECTION + STEP in self.limits.learned:
                return []
        return self._deadline(SECTION + by, self.limits.sections.get(by), since_ns, name)

    def _deadline(
        self, limit: str, limit_s: float | None, since_ns: int, section: str = "", sign: str = ""
    ) -> list[Deadline]:
        """Returns the deadline of a limit, as a list: empty where the limit is None, so that results can be added."""
        if limit_s is None:
            return []
        at_ns = since_ns + nanoseconds(limit_s) + self.paused_since(since_ns)
        return [Deadline(limit, limit_s, since_ns, at_ns, limit in self.limits.learned, section, sign)]

    def paused_since(self, since_ns: int) -> int:
        """Returns how many nanoseconds the monitor or the machine stood still after a moment."""
        return sum(until - max(start, since_ns) for start, until in self._pauses if until > since_ns)


def _times_before(start: CycleStart | None) -> RankTimes | None:
    """Returns the rank's time ledger as the monitor that was lost had sent it last; None: there is none.

    One that does not fit is dropped: an account of the time is not worth the watch.
    """
    if start is None or start.times is None:
        return None
    try:
        return rank_times(start.times)
    except ProtocolError:
        return None
