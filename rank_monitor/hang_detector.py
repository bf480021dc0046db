"""Tells a hang: messages and time in, actions and the next deadline out. Pure.

Facts and deadlines are the watch's (`watch.py`); here is when they alarm, and what follows. Knows no socket, process
or clock: `now_ns` is the monitor's CLOCK_MONOTONIC in nanoseconds, messages carry the rank's (one clock per machine).

    WAITING --attach--> WATCHED --detach--> DETACHED        by the rank's own word
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

import dataclasses
import signal
from enum import Enum

from rank_monitor import verdicts
from rank_monitor.actions import Action, DumpStacks, Interrupt, Kill, Note, SendVerdict, Signal
from rank_monitor.contract.codec import Received
from rank_monitor.contract.config import MonitorSettings
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.launcher_messages import CycleEnd, CycleStart, Verdict
from rank_monitor.contract.messages import Heartbeat
from rank_monitor.limits import nanoseconds
from rank_monitor.verdicts import HARD, NS_PER_S, SOFT, Deadline
from rank_monitor.watch import Watch

_LEAD_NS = NS_PER_S // 10
_MIN_SLACK_NS = NS_PER_S // 10


class State(Enum):
    """Where a rank is on the ladder; see the diagram above."""

    WAITING = "waiting"
    WATCHED = "watched"
    DETACHED = "detached"
    SUSPECT = "suspect"
    INTERRUPTED = "interrupted"
    CONDEMNED = "condemned"
    KILLED = "killed"


class Event(Enum):
    """What can happen to an alarm."""

    LEAD = "a deadline is close"
    ASK = "a deadline passed and the rank can restart in process"
    DUE = "a deadline passed"
    CLEAR = "no deadline is close any more"
    OVER = "the grace after the signal is over"
    RESET = "another cycle, the end of one, or the rank is gone"


ALARMS: dict[tuple[State | None, Event], State | None] = {
    (None, Event.LEAD): State.SUSPECT,
    (None, Event.ASK): State.INTERRUPTED,
    (None, Event.DUE): State.CONDEMNED,
    (State.SUSPECT, Event.CLEAR): None,
    (State.SUSPECT, Event.ASK): State.INTERRUPTED,
    (State.SUSPECT, Event.DUE): State.CONDEMNED,
    (State.SUSPECT, Event.RESET): None,
    (State.INTERRUPTED, Event.CLEAR): None,
    (State.INTERRUPTED, Event.DUE): State.CONDEMNED,
    (State.INTERRUPTED, Event.RESET): None,
    (State.CONDEMNED, Event.OVER): State.KILLED,
    (State.CONDEMNED, Event.RESET): None,
    (State.KILLED, Event.RESET): None,
}
"""Alarm (None: no alarm) and event -> alarm. What is not listed changes nothing."""


class HangDetector:
    """The detector of one rank, cycle after cycle."""

    def __init__(self, settings: MonitorSettings) -> None:
        self._settings = settings
        self._slack_ns = max(_MIN_SLACK_NS, nanoseconds(settings.oversleep_slack))
        self._pulse_ns = self._slack_ns // 2
        self._grace_ns = nanoseconds(settings.termination_grace_time)
        self._last_words: list[Action] = []
        self.watch = Watch(settings, None, 0)
        self._alarm: State | None = None
        self._step_since_ns = self._step_ns = 0
        self._stall_dumped_ns: int | None = None
        self._wake_ns: int | None = None
        self._running = False
        self._called_ns = 0

    @property
    def state(self) -> State:
        """Where the rank is now."""
        if self._alarm is not None:
            return self._alarm
        if self.watch.detached:
            return State.DETACHED
        return State.WATCHED if self.watch.attached else State.WAITING

    def on_message(self, received: Received, now_ns: int) -> list[Action]:
        """Takes a message of the rank, or one of the agent about its cycle.

        Raises:
            ProtocolError: its values make no sense; nothing changed.
        """
        actions = self._note_oversleep(now_ns)
        message = received.message
        if isinstance(message, CycleStart):
            actions += self._begin(message, now_ns)
        elif isinstance(message, CycleEnd):
            self.watch.end()
            self._step(Event.RESET)
        else:
            self.watch.note(message, received.sent_ns, now_ns)
        self._after_change(now_ns)
        return actions

    def on_heartbeat(self, sent_ns: int, now_ns: int) -> list[Action]:
        """What `on_message` does for a heartbeat, at less cost."""
        if self._alarm is not None or not self.watch.got_first_sign:
            return self.on_message(Received(Heartbeat(), 0, sent_ns), now_ns)
        self.watch.beat(min(sent_ns, now_ns))  # deadlines only move away: the next tick will see
        return self._note_oversleep(now_ns)

    def on_lost(self, now_ns: int) -> list[Action]:
        """The rank's connection closed while its process lives."""
        actions = self._note_oversleep(now_ns)
        self.watch.lost(now_ns)
        self._after_change(now_ns)
        return actions

    def on_exit(self, now_ns: int) -> list[Action]:
        """The rank's process ended."""
        actions = self._note_oversleep(now_ns)
        self.watch.exited()
        self._step(Event.RESET)
        self._after_change(now_ns)
        return actions

    def on_tick(self, now_ns: int) -> list[Action]:
        """Judges. To be called at `next_deadline()`, after all messages that wait have been taken."""
        actions = self._note_oversleep(now_ns)
        if self._alarm is State.CONDEMNED:
            if now_ns >= self._stepped():
                self._step(Event.OVER)
                actions += self._last_words
        elif self._alarm is not State.KILLED:
            actions += self._judge(now_ns)
            actions += self._judge_stall(now_ns)
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
        return pulse_ns if self._wake_ns is None else min(self._wake_ns, pulse_ns)

    def patience_ns(self) -> int:
        """How long a message of the rank may lie unread: a small part of any limit, and nothing during an alarm."""
        return 0 if self._alarm is not None else self.watch.limits.patience_ns

    # How it decides.

    def _begin(self, start: CycleStart, now_ns: int) -> list[Action]:
        self._step(Event.RESET)
        self._stall_dumped_ns = None
        try:
            self.watch = Watch(self._settings, start, now_ns)
        except ProtocolError as error:
            self.watch = Watch(self._settings, dataclasses.replace(start, limits=None), now_ns)
            return [Note(f"the limits of cycle {start.cycle} are not used: {error}")]
        return []

    def _step(self, event: Event) -> None:
        self._alarm = ALARMS.get((self._alarm, event), self._alarm)

    def _after_change(self, now_ns: int) -> None:
        if self._alarm in (State.SUSPECT, State.INTERRUPTED):
            first = self.watch.first_deadline()
            if first is None or now_ns < first.at_ns - _lead(first):
                self._step(Event.CLEAR)
        self._arm()

    def _judge(self, now_ns: int) -> list[Action]:
        first = self.watch.first_deadline()
        if first is None or now_ns < first.at_ns - _lead(first):
            self._step(Event.CLEAR)
            return []
        dump: list[Action] = [DumpStacks()] if self._alarm is None and self._settings.dump_stacks else []
        if now_ns < first.at_ns:
            self._step(Event.LEAD)
            return dump
        if not self.watch.wrapper.is_there:
            number = self._settings.rank_termination_signal
            return dump + self._condemn(first, now_ns, number, self._grace_ns, [Kill()])
        if first.limit == HARD:
            return dump + self._condemn_guarded(first, now_ns)
        if self._alarm is not State.INTERRUPTED:
            self._step(Event.ASK)
            return [*dump, Interrupt(self._verdict(first, now_ns, condemned=False))]
        return self._judge_asked(first, now_ns)

    def _judge_asked(self, missed: Deadline, now_ns: int) -> list[Action]:
        """The wrapper was asked to restart the training, and that has not begun."""
        wrapper = self.watch.wrapper
        if now_ns < (at_ns := missed.at_ns + wrapper.patience_ns):
            return []
        if missed.limit == SOFT:
            missed = dataclasses.replace(missed, limit=HARD, limit_s=wrapper.said.hard_timeout_s, at_ns=at_ns)
        return self._condemn_guarded(missed, now_ns)

    def _condemn_guarded(self, missed: Deadline, now_ns: int) -> list[Action]:
        """A rank with a wrapper gets SIGTERM, and after the wrapper's grace that again with SIGKILL."""
        grace_ns = nanoseconds(self.watch.wrapper.said.grace_s)
        return self._condemn(missed, now_ns, signal.SIGTERM, grace_ns, [Signal(signal.SIGTERM), Kill()])

    def _condemn(self, missed: Deadline, now_ns: int, number: int, grace_ns: int, last: list[Action]) -> list[Action]:
        self._step(Event.DUE)
        self._step_since_ns, self._step_ns, self._last_words = now_ns, grace_ns, last
        return [SendVerdict(self._verdict(missed, now_ns, condemned=True)), Signal(number)]

    def _judge_stall(self, now_ns: int) -> list[Action]:
        stall = self.watch.stall()
        if stall is None or now_ns < stall.at_ns - _lead(stall):
            return []
        actions: list[Action] = []
        if self._stall_dumped_ns != stall.since_ns:
            self._stall_dumped_ns = stall.since_ns
            actions += [DumpStacks()] if self._settings.dump_stacks else []
        if now_ns >= stall.at_ns:
            self.watch.warned()
            actions.append(SendVerdict(self._verdict(stall, now_ns, condemned=False)))
        return actions

    def _stepped(self) -> int:
        """When the present step of an alarm is over, pauses not counted."""
        return self._step_since_ns + self._step_ns + self.watch.paused_since(self._step_since_ns)

    def _arm(self) -> None:
        self._running = not self.watch.ended and self._alarm is not State.KILLED
        if not self._running:
            self._wake_ns = None
            return
        if self._alarm is State.CONDEMNED:
            self._wake_ns = self._stepped()
            return
        wakes = []
        if (first := self.watch.first_deadline()) is not None:
            after_ns = self.watch.wrapper.patience_ns if self._alarm is State.INTERRUPTED else 0
            wakes.append(first.at_ns + after_ns - (_lead(first) if self._alarm is None else 0))
        if (stall := self.watch.stall()) is not None:
            dumped = self._stall_dumped_ns == stall.since_ns
            wakes.append(stall.at_ns - (0 if dumped else _lead(stall)))
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
            waited_s=verdicts.waited_s(deadline, now_ns),
            learned=deadline.learned,
            iteration=watch.iteration,
            sections={name: (now_ns - since_ns) / NS_PER_S for name, since_ns in watch.sections.items()},
            reason=verdicts.reason(deadline, now_ns),
            line=verdicts.line(deadline, now_ns),
            frames=[],
            process={},
            condemned=condemned,
        )


def _lead(deadline: Deadline) -> int:
    """How long before a deadline the stacks are asked for: a tenth of a short limit, at most 0.1 s."""
    return min(_LEAD_NS, nanoseconds(deadline.limit_s) // 10)
