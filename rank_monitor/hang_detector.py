"""Detects a hang: messages and time in, actions and the next deadline out. Pure.

`server.py` calls it. Facts and deadlines are in `watch.py`; here is when a deadline raises an alarm, and what follows.
No socket, process or clock is used: `now_ns` is the monitor's CLOCK_MONOTONIC in nanoseconds, messages carry the rank's
(one clock per machine).

    WAITING --attach--> WATCHED --detach--> DETACHED        as the rank reports
        \\________________ | _______________/
                     no alarm
                           | a deadline is close: stacks                    RESET (new cycle, end of the
                        SUSPECT ---- sign of life ---> no alarm             cycle, rank exited): no alarm,
                           | the deadline passed                            from every state
       INTERRUPTED <-------+-------> CONDEMNED --grace over--> KILLED
      (an in-process       |             ^
       wrapper is there)   +-------------+ no sign of life still
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from rank_monitor import limits
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.codec import Received
from rank_monitor.contract.wire.launcher_messages import CycleStart, StopJudging, Verdict
from rank_monitor.contract.wire.messages import Heartbeat, Hello
from rank_monitor.limits import HARD, NS_PER_S, SOFT, Deadline, nanoseconds
from rank_monitor.look_ups import waits_for_look_ups, words_for
from rank_monitor.watch import RankWatch

# A dump of the stacks takes about 1 ms. Asked for this early, it is there at the deadline, on a busy machine as well,
# and the kill is not late.
_LEAD_NS = NS_PER_S // 10
# Before a restart in process all ranks of the job are asked, through a store, and none of them shows anything after it.
_LEAD_OF_SOFT_NS = 3 * NS_PER_S // 10
# The pulse is half of the slack: with a slack of 0 the monitor would never sleep.
_MIN_SLACK_NS = NS_PER_S // 10


@dataclass(frozen=True)
class DumpStacks:
    """Ask the rank for its stacks."""


@dataclass(frozen=True)
class SendVerdict:
    """Send a verdict to the agent; the server adds process, frames and pid. Precedes the signal to the rank."""

    verdict: Verdict


@dataclass(frozen=True)
class Interrupt:
    """Ask the in-process wrapper to restart. The rank is killed if it does not restart in time."""

    verdict: Verdict


@dataclass(frozen=True)
class SendSignal:
    """Send SIGCONT, then `number`: a stopped process handles no other signal than SIGKILL."""

    number: int


@dataclass(frozen=True)
class Kill:
    """Send SIGKILL."""


@dataclass(frozen=True)
class AskUsualGap:
    """Ask torch's flight recorder how long it usually is from one collective of the rank to the next, and call
    `on_usual_gap`: a stall is reported if it takes much longer than that."""


@dataclass(frozen=True)
class AskLookUp:
    """Find out whether the rank waits for a resolver, and call `on_look_up`: a limit that has passed may wait then."""


@dataclass(frozen=True)
class NotifyStandstill:
    """Tell the agent that the rank stands still: only the launcher can see whether that is a hang."""


@dataclass(frozen=True)
class Note:
    """Write a line to the log."""

    text: str


Action: TypeAlias = (
    DumpStacks | SendVerdict | Interrupt | SendSignal | Kill | AskUsualGap | AskLookUp | NotifyStandstill | Note
)
"""What the server is to do. It performs them in their order."""


class DetectorState(Enum):
    """The state of a rank; see the diagram above."""

    WAITING = "waiting"
    WATCHED = "watched"
    DETACHED = "detached"
    SUSPECT = "suspect"
    INTERRUPTED = "interrupted"
    CONDEMNED = "condemned"
    KILLED = "killed"


class DetectorEvent(Enum):
    """The events that change an alarm."""

    LEAD = "a deadline is close"
    ASK = "a deadline passed and the rank can restart in process"
    DUE = "a deadline passed"
    CLEAR = "no deadline is close any more"
    OVER = "the grace after the signal is over"
    RESET = "another cycle, the end of one, or the rank is gone"


ALARMS: dict[tuple[DetectorState | None, DetectorEvent], DetectorState | None] = {
    (None, DetectorEvent.LEAD): DetectorState.SUSPECT,
    (None, DetectorEvent.ASK): DetectorState.INTERRUPTED,
    (None, DetectorEvent.DUE): DetectorState.CONDEMNED,
    (DetectorState.SUSPECT, DetectorEvent.CLEAR): None,
    (DetectorState.SUSPECT, DetectorEvent.ASK): DetectorState.INTERRUPTED,
    (DetectorState.SUSPECT, DetectorEvent.DUE): DetectorState.CONDEMNED,
    (DetectorState.SUSPECT, DetectorEvent.RESET): None,
    (DetectorState.INTERRUPTED, DetectorEvent.CLEAR): None,
    (DetectorState.INTERRUPTED, DetectorEvent.DUE): DetectorState.CONDEMNED,
    (DetectorState.INTERRUPTED, DetectorEvent.RESET): None,
    (DetectorState.CONDEMNED, DetectorEvent.OVER): DetectorState.KILLED,
    (DetectorState.CONDEMNED, DetectorEvent.RESET): None,
    (DetectorState.KILLED, DetectorEvent.RESET): None,
}
"""Alarm (None: no alarm) and event -> alarm. What is not listed changes nothing."""


class HangDetector:
    """The detector of one rank, cycle after cycle."""

    def __init__(self, settings: MonitorSettings) -> None:
        self._settings = settings
        self._slack_ns = max(_MIN_SLACK_NS, nanoseconds(settings.oversleep_slack))
        self._pulse_ns = self._slack_ns // 2
        self._grace_ns = nanoseconds(settings.termination_grace_time)
        self._kill_actions: list[Action] = []
        self.watch = RankWatch(settings, None, 0)
        self._alarm: DetectorState | None = None
        self._condemned_ns = self._grace_left_ns = 0
        self._stall_dumped_at_ns: int | None = None
        self._gap_asked_ns: int | None = None
        self._wake_ns: int | None = None
        self._running = False
        self._called_ns = 0

    @property
    def state(self) -> DetectorState:
        """The state of the rank now: that of the alarm if there is one."""
        if self._alarm is not None:
            return self._alarm
        if self.watch.detached:
            return DetectorState.DETACHED
        if self.watch.attached:
            return DetectorState.WATCHED
        return DetectorState.WAITING

    def on_message(self, received: Received, now_ns: int) -> list[Action]:
        """Handles a message of the rank, or one of the agent about its cycle.

        Raises:
            ProtocolError: its values make no sense; nothing changed.
        """
        actions = self._note_oversleep(now_ns)
        message = received.message
        if isinstance(message, CycleStart):
            actions += self._begin_cycle(message, now_ns)
        elif isinstance(message, StopJudging):
            self.watch.end()
            self._transition(DetectorEvent.RESET)
        else:
            self.watch.note(message, received.sent_ns, now_ns)
            if isinstance(message, Hello) and self._alarm is DetectorState.INTERRUPTED:
                # The request to restart may have been lost with the connection before: it is sent again.
                self._transition(DetectorEvent.CLEAR)
        self._after_change(now_ns)
        return actions

    def on_heartbeat(self, sent_ns: int, now_ns: int) -> list[Action]:
        """What `on_message` does for a heartbeat, at less cost."""
        if self._alarm is not None or not self.watch.got_first_sign:
            return self.on_message(Received(Heartbeat(), 0, sent_ns), now_ns)
        self.watch.heartbeat(min(sent_ns, now_ns))  # deadlines only move away: the next tick will see
        return self._note_oversleep(now_ns)

    def on_lost(self, now_ns: int) -> list[Action]:
        """Handles the end of the rank's connection while its process lives."""
        actions = self._note_oversleep(now_ns)
        self.watch.lost(now_ns)
        self._after_change(now_ns)
        return actions

    def on_exit(self, now_ns: int) -> list[Action]:
        """Handles the end of the rank's process."""
        actions = self._note_oversleep(now_ns)
        self.watch.exited(now_ns)
        self._transition(DetectorEvent.RESET)
        self._after_change(now_ns)
        return actions

    def on_tick(self, now_ns: int) -> list[Action]:
        """Judges the deadlines. To be called at `next_deadline()`, after all waiting messages have been handled."""
        actions = self._note_oversleep(now_ns)
        if self._alarm is DetectorState.CONDEMNED:
            if now_ns >= self._grace_over_ns():
                self._transition(DetectorEvent.OVER)
                actions += self._kill_actions
        elif self._alarm is not DetectorState.KILLED:
            actions += self._judge(now_ns)
            actions += self._judge_stall(now_ns)
            actions += self._judge_standstill(now_ns)
        self._arm()
        return actions

    def next_deadline(self) -> int | None:
        """When `on_tick` should be called next; None while no rank runs.

        Never later than a short pulse, so that a pause of the whole machine shows, however far the deadline is and
        even if there is none: a message that waited through the pause may bring one that is over.
        """
        if not self._running:
            return None
        pulse_ns = self._called_ns + self._pulse_ns
        if self._wake_ns is None:
            return pulse_ns
        return min(self._wake_ns, pulse_ns)

    def max_delay_ns(self) -> int:
        """How long a message of the rank may stay unread: a small part of any limit, and 0 during an alarm."""
        if self._alarm is not None:
            return 0
        return self.watch.limits.max_delay_ns

    # How it decides.

    def _begin_cycle(self, start: CycleStart, now_ns: int) -> list[Action]:
        self._transition(DetectorEvent.RESET)
        self._stall_dumped_at_ns = self._gap_asked_ns = None
        try:
            self.watch = RankWatch(self._settings, start, now_ns)
        except ProtocolError as error:
            self.watch = RankWatch(self._settings, replace(start, limits=None), now_ns)
            return [Note(f"the limits of cycle {start.cycle} are not used: {error}")]
        return []

    def _transition(self, event: DetectorEvent) -> None:
        self._alarm = ALARMS.get((self._alarm, event), self._alarm)

    def _after_change(self, now_ns: int) -> None:
        if self._alarm in (DetectorState.SUSPECT, DetectorState.INTERRUPTED):
            first = self.watch.first_deadline()
            if first is None or now_ns < first.at_ns - _lead(first):
                self._transition(DetectorEvent.CLEAR)
        self._arm()

    def _judge(self, now_ns: int) -> list[Action]:
        first = self.watch.first_deadline()
        if first is None or now_ns < first.at_ns - _lead(first):
            self._transition(DetectorEvent.CLEAR)
            return []
        dump: list[Action] = []
        if self._alarm is None and self._settings.dump_stacks:
            dump.append(DumpStacks())
        if now_ns < first.at_ns:
            self._transition(DetectorEvent.LEAD)
            return dump
        if self._alarm is DetectorState.INTERRUPTED or not waits_for_look_ups(first):
            return dump + self._judge_missed(first, now_ns)
        self._transition(DetectorEvent.LEAD)
        return [*dump, AskLookUp()]

    def on_look_up(self, asks_resolver: bool, now_ns: int) -> list[Action]:
        """Handles the answer to `AskLookUp`: the limit that has passed waits for the look-up, or acts."""
        first = self.watch.first_deadline()
        if first is None or now_ns < first.at_ns:
            return []
        if self.watch.look_ups.postpone(first, asks_resolver, now_ns):
            actions = self._report_look_up(first, now_ns)
        else:
            actions = self._judge_missed(first, now_ns)
        self._arm()
        return actions

    def _report_look_up(self, spared: Deadline, now_ns: int) -> list[Action]:
        start, look_ups = self.watch.start, self.watch.look_ups
        if start is None or look_ups.is_reported:
            return []
        look_ups.is_reported = True
        waited_s = limits.waited_s(spared, now_ns)
        return [Note(words_for(start.rank, limits.setting(spared), waited_s))]

    def _judge_missed(self, missed: Deadline, now_ns: int) -> list[Action]:
        if not self.watch.wrapper.is_there:
            number = self._settings.rank_termination_signal
            return self._condemn(missed, now_ns, number, self._grace_ns, [Kill()])
        if missed.limit == HARD:
            return self._condemn_wrapped(missed, now_ns)
        if self._alarm is not DetectorState.INTERRUPTED:
            self._transition(DetectorEvent.ASK)
            return [Interrupt(self._verdict(missed, now_ns, condemned=False))]
        return self._judge_asked(missed, now_ns)

    def _judge_asked(self, missed: Deadline, now_ns: int) -> list[Action]:
        """Judges a rank whose wrapper was asked to restart the training and has not begun to."""
        wrapper = self.watch.wrapper
        at_ns = missed.at_ns + wrapper.slack_ns
        if now_ns < at_ns:
            return []
        if missed.limit == SOFT:
            missed = replace(missed, limit=HARD, limit_s=wrapper.report.hard_timeout_s, at_ns=at_ns)
        return self._condemn_wrapped(missed, now_ns)

    def _condemn_wrapped(self, missed: Deadline, now_ns: int) -> list[Action]:
        """Condemns a rank with a wrapper: SIGTERM, and after the wrapper's grace SIGTERM and SIGKILL."""
        grace_ns = nanoseconds(self.watch.wrapper.report.grace_s)
        return self._condemn(missed, now_ns, signal.SIGTERM, grace_ns, [SendSignal(signal.SIGTERM), Kill()])

    def _condemn(self, missed: Deadline, now_ns: int, number: int, grace_ns: int, last: list[Action]) -> list[Action]:
        self._transition(DetectorEvent.DUE)
        self._condemned_ns, self._grace_left_ns, self._kill_actions = now_ns, grace_ns, last
        return [SendVerdict(self._verdict(missed, now_ns, condemned=True)), SendSignal(number)]

    def on_usual_gap(self, usual_gap_s: float | None, now_ns: int) -> list[Action]:
        """Handles the answer to `AskUsualGap`; None: it is not known."""
        self.watch.usual_gap_s = usual_gap_s
        actions = self._judge_stall(now_ns)
        self._arm()
        return actions

    def _judge_stall(self, now_ns: int) -> list[Action]:
        stall = self.watch.stall()
        if stall is None or now_ns < stall.at_ns - _lead(stall):
            return []
        actions: list[Action] = []
        if self._stall_dumped_at_ns != stall.at_ns:
            self._stall_dumped_at_ns = stall.at_ns
            if self._settings.dump_stacks:
                actions.append(DumpStacks())
        if now_ns >= stall.at_ns and self._gap_asked_ns != stall.since_ns:
            self._gap_asked_ns = stall.since_ns
            actions.append(AskUsualGap())
        elif now_ns >= stall.at_ns:
            self.watch.stall_reported()
            actions.append(SendVerdict(self._verdict(stall, now_ns, condemned=False)))
        return actions

    def _judge_standstill(self, now_ns: int) -> list[Action]:
        check_at_ns = self.watch.check_at_ns()
        if check_at_ns is None or now_ns < check_at_ns:
            return []
        self.watch.standstill_notified()
        return [NotifyStandstill()]

    def _grace_over_ns(self) -> int:
        """When the present step of an alarm is over. Pauses extend it."""
        return self._condemned_ns + self._grace_left_ns + self.watch.paused_since(self._condemned_ns)

    def _arm(self) -> None:
        self._running = not self.watch.ended and self._alarm is not DetectorState.KILLED
        if not self._running:
            self._wake_ns = None
            return
        if self._alarm is DetectorState.CONDEMNED:
            self._wake_ns = self._grace_over_ns()
            return
        wakes = []
        first = self.watch.first_deadline()
        if first is not None:
            wake_ns = first.at_ns
            if self._alarm is None:
                wake_ns -= _lead(first)
            elif self._alarm is DetectorState.INTERRUPTED:
                wake_ns += self.watch.wrapper.slack_ns
            wakes.append(wake_ns)
        stall = self.watch.stall()
        if stall is not None:
            if self._stall_dumped_at_ns == stall.at_ns:
                wakes.append(stall.at_ns)
            else:
                wakes.append(stall.at_ns - _lead(stall))
        check_at_ns = self.watch.check_at_ns()
        if check_at_ns is not None:
            wakes.append(check_at_ns)
        self._wake_ns = min(wakes, default=None)

    def _note_oversleep(self, now_ns: int) -> list[Action]:
        called_ns, self._called_ns = self._called_ns, now_ns
        if now_ns <= called_ns + self._slack_ns or not self._running:
            return []
        promised_ns = called_ns + self._pulse_ns
        if self._wake_ns is not None:
            promised_ns = min(promised_ns, self._wake_ns)
        if now_ns <= promised_ns + self._slack_ns:
            return []
        self.watch.pause(called_ns, now_ns)
        self._arm()
        asleep_s = (now_ns - called_ns) / NS_PER_S
        return [
            Note(f"this monitor, or the whole machine, stood still for {asleep_s:.2f} s; every deadline moves by it")
        ]

    def _verdict(self, deadline: Deadline, now_ns: int, condemned: bool) -> Verdict:
        watch, start = self.watch, self.watch.start
        assert start is not None
        return Verdict(
            cycle=start.cycle,
            rank=start.rank,
            pid=start.rank_pid,
            limit=deadline.limit,
            limit_s=deadline.limit_s,
            waited_s=limits.waited_s(deadline, now_ns),
            learned=deadline.learned,
            iteration=watch.iteration,
            sections={name: (now_ns - since_ns) / NS_PER_S for name, since_ns in watch.sections.items()},
            reason=limits.reason(deadline, now_ns),
            line=limits.line(deadline, now_ns),
            frames=[],
            process={},
            condemned=condemned,
        )


def _lead(deadline: Deadline) -> int:
    """How long before a deadline the stacks are asked for, at most a tenth of the limit."""
    if deadline.limit == SOFT:
        most_ns = _LEAD_OF_SOFT_NS
    else:
        most_ns = _LEAD_NS
    return min(most_ns, nanoseconds(deadline.limit_s) // 10)
