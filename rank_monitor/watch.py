"""The known facts of one rank in one cycle, and the deadlines that follow from them. Pure.

`hang_detector.py` passes messages in and asks for deadlines; alarms and actions are there. Moments are monotonic
nanoseconds of the rank, limited to the time from the start of the cycle to the monitor's present.
`watched_wrapper.py` has the facts of the rank's in-process wrapper.
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
_UNUSUAL_FACTOR = 20
"""So many times the usual time between two collectives is not usual any more: an evaluation or a checkpoint that takes
as long as some steps is no stall."""
# Each deadline sums over all pauses, so only the latest are kept.
_MAX_PAUSES = 64


class RankWatch:
    """The facts of one cycle of one rank.

    Args:
        settings: limits and counts as configured.
        start: how the cycle began; None between two cycles, when nothing is judged.
        now_ns: when the monitor was notified of it.

    Raises:
        ProtocolError: `start` carries invalid limits.
    """

    def __init__(self, settings: MonitorSettings, start: CycleStart | None, now_ns: int) -> None:
        self._settings = settings
        self.start = start
        self.limits = WatchLimits.configured(settings)
        if start is not None and start.limits is not None:
            self.limits = WatchLimits.of_message(from_json(LimitsSet, start.limits))
        self.ended = self._over = start is None
        is_replaced = start is not None and start.reconnect
        self.attached = is_replaced and start is not None and start.attached
        self.detached = False
        self.connected = False
        self.client_pid = 0
        self.lost_ns = now_ns
        self.last_sign_ns: int | None = None
        self.got_first_sign = False
        self.iteration = NO_ITERATION
        self.sections: dict[str, int] = {}
        self.wrapper = WatchedWrapper()
        self._connect_armed = not is_replaced
        if start is None:
            self._connect_since_ns = 0
        else:
            self._connect_since_ns = start.started_ns
        self._out_since_ns: int | None = None
        self._out_reported = False
        self._detached_ns = 0
        self._warmup_steps = settings.num_warmup_iterations
        self._steps = 0
        self._last_step_ns = -1
        self._stamp_ns: int | None = None
        self._warned = False
        self.usual_gap_s: float | None = None
        """The usual time between two collectives, if it was asked for since the last stamp."""
        self.look_ups = LookUps()
        self._standstill = Standstill(settings.hang_timeout)
        self._hang_overdue: Deadline | None = None
        self._log_silent_ns: int | None = None
        self._reports_iterations = False
        self._pauses: list[tuple[int, int]] = []
        self.ledger = TimeLedger(_times_before(start))

    # Facts.

    def note(self, message: Message, sent_ns: int, now_ns: int) -> None:
        """Updates the facts from a message of the rank.

        Raises:
            ProtocolError: it sets invalid limits, or is a `RestartReport` with invalid numbers; nothing changed.
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
        """Notes a sign of life. `sent_ns` must not be in the future."""
        self.got_first_sign = True
        if self.last_sign_ns is None or sent_ns > self.last_sign_ns:
            self.last_sign_ns = sent_ns

    def lost(self, now_ns: int) -> None:
        """Notes that the connection closed while the rank lives."""
        self.connected = False
        self.lost_ns = now_ns

    def exited(self, now_ns: int) -> None:
        """Notes that the rank's process ended: nothing is judged until another process of the rank sends a hello."""
        self.ledger.exited(now_ns)
        self.ended, self.connected = True, False
        self.attached = self.detached = self._connect_armed = False
        self.wrapper = WatchedWrapper()

    def end(self) -> None:
        """Notes that the launcher ends the cycle: nothing is judged until the next."""
        self.ended = self._over = True

    def pause(self, from_ns: int, until_ns: int) -> None:
        """Excludes a stretch in which the monitor or the machine stood still from every deadline that was running."""
        self._pauses.append((from_ns, until_ns))
        del self._pauses[:-_MAX_PAUSES]
        self.ledger.pause(from_ns, until_ns)

    def stall_reported(self) -> None:
        """Notes that the present stall was reported. The next progress arms the warning again."""
        self._warned = True

    def _limited(self, moment_ns: int, now_ns: int) -> int:
        earliest_ns = 0
        if self.start is not None:
            earliest_ns = self.start.started_ns
        return min(max(moment_ns, earliest_ns), now_ns)

    def _note_sections(self, message: Sections, sent_ns: int, now_ns: int) -> None:
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
        """Notes a step that the rank printed. What the training reports itself is more exact, and wins."""
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

        Raises:
            ProtocolError: its values make no sense; nothing changed.
        """
        self.wrapper.check(report)
        if self.wrapper.note(report, self._limited(report.began_ns, now_ns), since_ns):
            self._discard_earlier_call(self.wrapper.began_ns)

    def _note_phase(self, sent_ns: int) -> None:
        """Notes in the ledger what the wrapper does now."""
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
        """Notes that the launcher has found a hang: it counts pauses itself, so the deadline has passed already."""
        since_ns = now_ns - nanoseconds(message.waited_s)
        at_ns = min(now_ns, since_ns + nanoseconds(message.limit_s))
        self._hang_overdue = Deadline(HANG, message.limit_s, since_ns, at_ns, sign=message.reason)

    def _note_progress(self, stamp_ns: int, sent_ns: int) -> None:
        self._standstill.stamped(stamp_ns, sent_ns)
        if self._stamp_ns is None or stamp_ns > self._stamp_ns:
            self._stamp_ns = stamp_ns
            self._warned, self.usual_gap_s = False, None

    def _discard_earlier_call(self, now_ns: int) -> None:
        """Discards signs and sections of an earlier call of the training's function, which is called again.

        Heartbeats and sections are judged again from the first one of this call.
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
        self._out_reported = False  # what it says next of its sections is the truth, with the moment it became so
        if message.restart is None:
            self.wrapper.note_none()
        elif message.restart != self.wrapper.report:
            self._note_restart(message.restart, sent_ns, now_ns)

    def _note_attach(self, message: Attach, sent_ns: int) -> None:
        self.ledger.attached(sent_ns, anew=self.attached or self.detached)
        if self.attached or self.detached:  # begun anew: what was open is of the watch before
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
        """The earliest of all deadlines in force; None when nothing is judged."""
        in_force = map(self.look_ups.postponed, self._deadlines())
        return min(in_force, key=lambda deadline: deadline.at_ns, default=None)

    def stall(self) -> Deadline | None:
        """The deadline of the stall warning; None if the stall was reported or the main thread sends no stamps."""
        if self.ended or self.detached or self._warned or not self.connected or self._stamp_ns is None:
            return None
        limit_s = self._settings.stall_warning
        if limit_s is None or self.wrapper.judged is Judged.NOTHING:
            return None
        limit_s = max(limit_s, _UNUSUAL_FACTOR * (self.usual_gap_s or 0.0))
        return self._deadline(STALL, limit_s, max(self._stamp_ns, self.wrapper.since_ns))

    # What the launcher is told and asks for to find a hang (`hang_timeout`).

    def check_at_ns(self) -> int | None:
        """When the launcher is to be told that the rank stands still; None: never, as far as is known now."""
        if not self._shows_standstill:
            return None
        return self._standstill.check_at_ns(self.last_sign_ns, self.paused_since)

    def standstill_notified(self) -> None:
        """Notes that the launcher was told that the rank stands still."""
        self._standstill.notified(self.last_sign_ns)

    def idle_s(self, now_ns: int) -> float | None:
        """Seconds without a stamp or a report of the rank, without pauses; None: it does not show that now."""
        if not self._shows_standstill:
            return None
        return self._age_s(self._standstill.idle_since_ns(self.last_sign_ns), now_ns)

    def report_age_s(self, now_ns: int) -> float | None:
        """Seconds since its last heartbeat, section, iteration or printed step, without pauses; None: it had none."""
        return self._age_s(self._standstill.reported_ns(self.last_sign_ns), now_ns)

    @property
    def has_own_limit(self) -> bool:
        """Whether a section is open that has a limit of its own."""
        return self.attached and any(self._deadlines_of(name, since_ns) for name, since_ns in self.sections.items())

    @property
    def _shows_standstill(self) -> bool:
        if self.ended or self.detached or self.wrapper.judged is Judged.NOTHING:
            return False
        return self.connected

    def _age_s(self, since_ns: int | None, now_ns: int) -> float | None:
        if since_ns is None:
            return None
        return max(0, now_ns - since_ns - self.paused_since(since_ns)) / NS_PER_S

    def _deadlines(self) -> list[Deadline]:
        if self.ended or self.start is None or self.wrapper.judged is Judged.NOTHING:
            return []
        if self.wrapper.judged is Judged.HARD:
            hard_s = self.wrapper.report.hard_timeout_s
            return [self._deadline(HARD, hard_s, self.wrapper.since_ns, sign=self.wrapper.expected_end)]
        # No stamp is expected of a process that sends none (it could start no thread); one that is cut off may hang.
        has_stamps = self._stamp_ns is not None or not self.connected
        soft_s = self.wrapper.report.soft_timeout_s
        expected = self.wrapper.expected_signs(has_stamps, self._stamp_ns or 0)
        found = [self._deadline(SOFT, soft_s, since_ns, sign=sign) for sign, since_ns in expected]
        if self.detached:
            found += self._if_set("teardown", self._settings.teardown_timeout, self._detached_ns)
        elif self.attached:
            found += self._connection_deadlines() + self._heartbeat_deadlines() + self._section_deadlines()
        elif self._connect_armed:
            found += self._if_set("connect", self._settings.connect_timeout, self._connect_since_ns)
        if not self.detached:
            found += self._log_deadlines()
        if self._hang_overdue is not None:
            found.append(self._hang_overdue)
        return found

    def _log_deadlines(self) -> list[Deadline]:
        since_ns = self._log_silent_ns
        # What was printed before is of an earlier process of the rank, or of an earlier call of its function.
        if since_ns is None or self.start is None or since_ns < max(self.start.started_ns, self.wrapper.began_ns):
            return []
        return self._if_set(LOG, self._settings.watch_log_timeout, since_ns)

    def _connection_deadlines(self) -> list[Deadline]:
        if self.connected:
            return []
        if self._settings.connect_timeout is not None or self.last_sign_ns is None:
            return self._if_set("reconnect", self._settings.connect_timeout or self.limits.largest, self.lost_ns)
        return self._if_set("reconnect", self.limits.largest, self.last_sign_ns)

    def _heartbeat_deadlines(self) -> list[Deadline]:
        if self.last_sign_ns is None:
            return []
        if self.got_first_sign:
            return self._if_set("subsequent", self.limits.subsequent, self.last_sign_ns)
        return self._if_set("initial", self.limits.initial, self.last_sign_ns)

    def _section_deadlines(self) -> list[Deadline]:
        if self.sections:
            return [found for name, since_ns in self.sections.items() for found in self._deadlines_of(name, since_ns)]
        if self._out_since_ns is None or not self.limits.any_section:
            return []
        return self._if_set("out_of_section", self.limits.out_of_section, self._out_since_ns)

    def _deadlines_of(self, name: str, since_ns: int) -> list[Deadline]:
        by = name
        if name == STEP and self._steps <= self._warmup_steps:
            if self.limits.sections.get(WARMUP) is not None:
                by = WARMUP
            elif SECTION + STEP in self.limits.learned:
                return []
        return self._if_set(SECTION + by, self.limits.sections.get(by), since_ns, name)

    def _if_set(self, limit: str, limit_s: float | None, since_ns: int, section: str = "") -> list[Deadline]:
        if limit_s is None:
            return []
        return [self._deadline(limit, limit_s, since_ns, section)]

    def _deadline(self, limit: str, limit_s: float, since_ns: int, section: str = "", sign: str = "") -> Deadline:
        at_ns = since_ns + nanoseconds(limit_s) + self.paused_since(since_ns)
        return Deadline(limit, limit_s, since_ns, at_ns, limit in self.limits.learned, section, sign)

    def paused_since(self, since_ns: int) -> int:
        """Nanoseconds of all pauses after a moment."""
        return sum(until - max(start, since_ns) for start, until in self._pauses if until > since_ns)


def _times_before(start: CycleStart | None) -> RankTimes | None:
    """The rank's time ledger as the monitor that was lost had sent it last; None: there is none."""
    if start is None or start.times is None:
        return None
    try:
        return rank_times(start.times)
    except ProtocolError:
        return None
