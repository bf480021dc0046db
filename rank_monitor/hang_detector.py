"""Detects a hang: messages and time in, actions and the next wake-up out. Pure.

`server.py` calls it: `on_message`, `on_heartbeat`, `on_lost` and `on_exit` when something happened, `on_tick` when
`next_wake` is reached, with what /proc says of a look-up if `needs_look_up` asks for it. Each call returns the
actions that the server is to perform. `watch.py` holds the facts of the rank and makes deadlines of them; the detector
says when a deadline raises an alarm, and what follows. Neither uses a socket, a process or a clock: `now_ns` is the
monitor's CLOCK_MONOTONIC in nanoseconds, and messages carry the rank's, which is the same clock (one per machine).

**How a hang becomes a kill.** Each limit in force gives one deadline; the earliest of them counts.

1. 0.1 s before the deadline the rank is SUSPECT. Unless `dump_stacks` is off, its stacks are asked for and the agent is
   notified. Nothing has happened to the rank yet: a sign of life moves the deadline away, and the alarm is gone.
2. At the deadline a rank without an in-process wrapper is CONDEMNED: the verdict goes to the agent, then SIGCONT and
   the configured signal to the rank. A sign of life changes nothing any more.
3. A rank that can restart in process is asked to do so first (INTERRUPTED). If it has not begun to when the hard
   timeout is over, it is CONDEMNED as well.
4. A condemned rank that outlives the grace gets SIGKILL (KILLED). Nothing more is done to it.

A limit that passes while the rank looks up a name waits for the answer instead (`look_ups.py`).

    WAITING --attach--> WATCHED --detach--> DETACHED        as the rank reports
        \\________________ | _______________/
                     no alarm
                           | a deadline is close: stacks                    RESET (new cycle, end of the
                        SUSPECT ---- sign of life ---> no alarm             cycle, rank exited): no alarm,
                           | the deadline passed                            from every state
       INTERRUPTED <-------+-------> CONDEMNED --grace over--> KILLED
      (an in-process       |             ^
       wrapper is there)   +-------------+ no sign of life still

**Pauses.** A monitor that is called much later than it asked to be was stopped itself, or the whole machine was. What
the rank did meanwhile is not known, so every deadline moves by the pause (`_note_oversleep`). For this to be noticed,
`next_wake` is never further away than half of the slack.

**Beside the alarm**, and independent of it, two things are only reported: a stall of the main thread (a warning), and a
standstill (a question to the launcher, which alone sees all ranks).
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

_LEAD_NS = NS_PER_S // 10
"""How long before a deadline the rank is suspect. A dump of the stacks takes about 1 ms; asked for this early, it is
there at the deadline on a busy machine as well, and the kill is not late."""
_LEAD_OF_SOFT_NS = 3 * NS_PER_S // 10
"""The same before a request to restart in process. All ranks of the job are asked for their stacks then, through a
store, and once they are interrupted no stack shows any more who waited for whom."""
_MIN_SLACK_NS = NS_PER_S // 10
"""The least `oversleep_slack` that is used. The pulse is half of the slack: with a slack of 0 the monitor would never
sleep."""


@dataclass(frozen=True)
class DumpStacks:
    """Ask the rank for its stacks and collectives, and notify the agent that a limit is about to pass."""


@dataclass(frozen=True)
class SendVerdict:
    """Send a verdict to the agent; the server adds process, frames and pid.

    Precedes the signal to the rank: the agent must know why the rank dies before it sees the death.
    """

    verdict: Verdict


@dataclass(frozen=True)
class Interrupt:
    """Ask the in-process wrapper of the rank to restart, and send the verdict to the agent.

    The rank is condemned if it does not begin to restart in time.
    """

    verdict: Verdict


@dataclass(frozen=True)
class SendSignal:
    """Send SIGCONT, then signal `number`: a stopped process handles no other signal than SIGKILL."""

    number: int


@dataclass(frozen=True)
class Kill:
    """Send SIGKILL: the rank has outlived the grace after the first signal."""


@dataclass(frozen=True)
class AskUsualGap:
    """Ask torch's flight recorder how long it usually is from one collective of the rank to the next, and call
    `on_usual_gap` with the answer. A stall is reported only if it takes much longer than that: an evaluation between
    two collectives is none."""


@dataclass(frozen=True)
class NotifyStandstill:
    """Notify the agent that the rank stands still. Only the launcher can see whether that is a hang, and whose: the
    rank may wait for another rank."""


@dataclass(frozen=True)
class Note:
    """Write a line to the monitor's log."""

    text: str


Action: TypeAlias = DumpStacks | SendVerdict | Interrupt | SendSignal | Kill | AskUsualGap | NotifyStandstill | Note
"""What the server is to do. The server performs the actions of one call in their order."""


class DetectorState(Enum):
    """The state of a rank; see the diagram above.

    The first three follow from what the rank reports about its watch. The other four are alarms, which hide them.
    """

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
    """The detector of one rank, cycle after cycle.

    Args:
        settings: limits and counts as configured, the same for all cycles.
    """

    def __init__(self, settings: MonitorSettings) -> None:
        self._settings = settings
        self._slack_ns = max(_MIN_SLACK_NS, nanoseconds(settings.oversleep_slack))
        self._pulse_ns = self._slack_ns // 2
        self._grace_ns = nanoseconds(settings.termination_grace_time)
        self._kill_actions: list[Action] = []
        """What follows when the grace of a condemned rank is over."""
        self.watch = RankWatch(settings, None, 0)
        """The facts of the present cycle; a new one for each `CycleStart`."""
        self._alarm: DetectorState | None = None
        self._condemned_ns = self._grace_in_force_ns = 0
        """When the rank was condemned, and how long from then to `_kill_actions`."""
        self._stall_dumped_at_ns: int | None = None
        """The deadline of the stall for which stacks were asked: once for each stall."""
        self._gap_asked_ns: int | None = None
        """The beginning of the stall for which the usual time between collectives was asked."""
        self._wake_ns: int | None = None
        """When `on_tick` has something to do; None: nothing is known."""
        self._running = False
        """Whether there is anything to judge: not between two cycles, after the rank's end, or once it is killed."""
        self._called_ns = 0
        """When the server last called, for `_note_oversleep`."""

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
        """Handles a message of the rank, or one of the agent about the rank's cycle. Returns what the server is to do.

        Raises:
            ProtocolError: the values of the message make no sense; nothing changed.
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
        """Does what `on_message` does for a heartbeat, at less cost.

        Without an alarm a heartbeat only moves deadlines away, so `next_wake` is not computed again: it stays what it
        was. The tick at that moment finds that nothing is due, and makes the new deadline and the next wake-up. The
        first heartbeat and those during an alarm go the long way.
        """
        if self._alarm is not None or not self.watch.got_first_sign:
            return self.on_message(Received(Heartbeat(), 0, sent_ns), now_ns)
        self.watch.heartbeat(min(sent_ns, now_ns))
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

    def needs_look_up(self, now_ns: int) -> bool:
        """Returns whether `on_tick` at this moment must know if the rank waits for a resolver: a limit has passed that
        waits for look-ups."""
        if self._alarm not in (None, DetectorState.SUSPECT):
            return False
        first = self.watch.first_deadline()
        return first is not None and now_ns >= first.at_ns and waits_for_look_ups(first)

    def on_tick(self, now_ns: int, asks_resolver: bool = False) -> list[Action]:
        """Judges the deadlines. To be called at `next_wake()`, after all waiting messages have been handled.

        An earlier or a later call does no harm: what is due is found by `now_ns`.

        Args:
            now_ns: monotonic nanoseconds.
            asks_resolver: whether the rank's main thread waits for a resolver. A limit that has passed then waits too,
                for as long as `look_ups.py` says. Must be known where `needs_look_up` holds.
        """
        actions = self._note_oversleep(now_ns)
        if self._alarm is DetectorState.CONDEMNED:
            if now_ns >= self._grace_over_ns():
                self._transition(DetectorEvent.OVER)
                actions += self._kill_actions
        elif self._alarm is not DetectorState.KILLED:
            actions += self._judge(now_ns, asks_resolver)
            actions += self._judge_stall(now_ns)
            actions += self._judge_standstill(now_ns)
        self._arm()
        return actions

    def next_wake(self) -> int | None:
        """Returns when `on_tick` should be called next (monotonic ns); None while no rank runs. A wake-up need not be a
        deadline: it may also be a lead before one, or one that a heartbeat has moved since.

        Never further away than half of the slack (the pulse), even if no deadline is in force. Otherwise a pause of the
        whole machine could not be told from a long sleep, and a message that waited through the pause may bring a
        deadline that is over already.
        """
        if not self._running:
            return None
        pulse_ns = self._called_ns + self._pulse_ns
        if self._wake_ns is None:
            return pulse_ns
        return min(self._wake_ns, pulse_ns)

    def max_delay_ns(self) -> int:
        """Returns for how many nanoseconds a message of the rank may stay unread: a small part of any limit. 0 during
        an alarm, where the next message decides. Asked by `rank_socket.py` after each reading."""
        if self._alarm is not None:
            return 0
        return self.watch.limits.max_delay_ns

    # How it decides.

    def _begin_cycle(self, start: CycleStart, now_ns: int) -> list[Action]:
        """Begins with fresh facts. Limits in `start` that make no sense are left out, and the configured ones hold: a
        watch with other limits is better than none."""
        self._transition(DetectorEvent.RESET)
        self._stall_dumped_at_ns = self._gap_asked_ns = None
        try:
            self.watch = RankWatch(self._settings, start, now_ns)
        except ProtocolError as error:
            self.watch = RankWatch(self._settings, replace(start, limits=None), now_ns)
            return [Note(f"the limits of cycle {start.cycle} are not used: {error}")]
        return []

    def _transition(self, event: DetectorEvent) -> None:
        """Changes the alarm by the table `ALARMS`; an event without a row changes nothing."""
        self._alarm = ALARMS.get((self._alarm, event), self._alarm)

    def _after_change(self, now_ns: int) -> None:
        """Ends an alarm that the change has made void, and computes anew when `on_tick` is due."""
        if self._alarm in (DetectorState.SUSPECT, DetectorState.INTERRUPTED):
            first = self.watch.first_deadline()
            if first is None or now_ns < first.at_ns - _lead(first):
                self._transition(DetectorEvent.CLEAR)
        self._arm()

    def _judge(self, now_ns: int, asks_resolver: bool) -> list[Action]:
        """Raises the alarm of the earliest deadline, as far as its moment has come."""
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
        may_wait = self._alarm is not DetectorState.INTERRUPTED and waits_for_look_ups(first)
        if may_wait and self.watch.look_ups.postpone(first, asks_resolver, now_ns):
            self._transition(DetectorEvent.LEAD)
            return dump + self._report_look_up(first, now_ns)
        return dump + self._judge_missed(first, now_ns)

    def _report_look_up(self, spared: Deadline, now_ns: int) -> list[Action]:
        """Returns the log line about a look-up that limits wait for: once for each look-up."""
        start, look_ups = self.watch.start, self.watch.look_ups
        if start is None or look_ups.is_reported:
            return []
        look_ups.is_reported = True
        waited_s = limits.waited_s(spared, now_ns)
        return [Note(words_for(start.rank, limits.setting(spared), waited_s))]

    def _judge_missed(self, missed: Deadline, now_ns: int) -> list[Action]:
        """Condemns the rank for a limit that has passed; one that can restart in process is asked to do so first."""
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
        """Judges a rank whose wrapper was asked to restart the training and has not begun to.

        The wrapper has the time from the soft to the hard timeout. A missed soft timeout is reported as the hard one
        then: the hard timeout is what ends the rank.
        """
        wrapper = self.watch.wrapper
        at_ns = missed.at_ns + wrapper.slack_ns
        if now_ns < at_ns:
            return []
        if missed.limit == SOFT:
            missed = replace(missed, limit=HARD, limit_s=wrapper.report.hard_timeout_s, at_ns=at_ns)
        return self._condemn_wrapped(missed, now_ns)

    def _condemn_wrapped(self, missed: Deadline, now_ns: int) -> list[Action]:
        """Condemns a rank with a wrapper: SIGTERM, and after the wrapper's own grace SIGTERM and SIGKILL."""
        grace_ns = nanoseconds(self.watch.wrapper.report.grace_s)
        return self._condemn(missed, now_ns, signal.SIGTERM, grace_ns, [SendSignal(signal.SIGTERM), Kill()])

    def _condemn(self, missed: Deadline, now_ns: int, number: int, grace_ns: int, last: list[Action]) -> list[Action]:
        """Condemns the rank: verdict and signal `number` now, `last` when `grace_ns` are over."""
        self._transition(DetectorEvent.DUE)
        self._condemned_ns = now_ns
        self._grace_in_force_ns = grace_ns
        self._kill_actions = last
        return [SendVerdict(self._verdict(missed, now_ns, condemned=True)), SendSignal(number)]

    def on_usual_gap(self, usual_gap_s: float | None, now_ns: int) -> list[Action]:
        """Handles the answer to `AskUsualGap`. Called by the server within the action.

        Args:
            usual_gap_s: seconds from one collective to the next; None: the recorder does not know.
            now_ns: monotonic nanoseconds, after the answer.
        """
        self.watch.usual_gap_s = usual_gap_s
        actions = self._judge_stall(now_ns)
        self._arm()
        return actions

    def _judge_stall(self, now_ns: int) -> list[Action]:
        """Judges the main thread, which a stall only warns of: stacks before the limit, then the question how long the
        rank usually takes, and a verdict that does not condemn if that is exceeded too."""
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
        """Notifies the agent once of each standstill, when a quarter of `hang_timeout` has passed without a sign."""
        check_at_ns = self.watch.check_at_ns()
        if check_at_ns is None or now_ns < check_at_ns:
            return []
        self.watch.standstill_notified()
        return [NotifyStandstill()]

    def _grace_over_ns(self) -> int:
        """When the grace of a condemned rank is over. Pauses extend it: the rank could not end itself meanwhile."""
        return self._condemned_ns + self._grace_in_force_ns + self.watch.paused_since(self._condemned_ns)

    def _arm(self) -> None:
        """Computes when `on_tick` has something to do. To be called after every change of the facts or the alarm."""
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
        """Excludes a pause of this monitor from every deadline, if there was one. Called first in each entry.

        The server was to call at the latest half a slack after its last call, or at `_wake_ns`. If it comes later than
        that by more than the slack, the process did not run: it was stopped, or the machine was suspended. The pause
        is counted from the last call.
        """
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
        """Returns the finding about a deadline that has passed, with the state of the rank at `now_ns`."""
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
    """Returns how many nanoseconds before a deadline the stacks are asked for: at most a tenth of the limit."""
    if deadline.limit == SOFT:
        most_ns = _LEAD_OF_SOFT_NS
    else:
        most_ns = _LEAD_NS
    return min(most_ns, nanoseconds(deadline.limit_s) // 10)
