"""What is known of one rank in one cycle, and by when it must show life. Pure.

Messages change facts; deadlines follow from the facts. Knows no state of alarm and takes no action. Moments are
monotonic nanoseconds of the rank, never later than the monitor's own and never before the start of the cycle.
"""

from __future__ import annotations

from rank_monitor.contract.config import MonitorSettings
from rank_monitor.contract.launcher_messages import CycleStart
from rank_monitor.contract.messages import (
    NO_ITERATION,
    Attach,
    Detach,
    Guard,
    Heartbeat,
    Hello,
    IterationReached,
    LimitsSet,
    Message,
    Ping,
    Progress,
    Sections,
)
from rank_monitor.guard import END_OF_FINALIZE, Wrapper
from rank_monitor.limits import Limits, nanoseconds
from rank_monitor.verdicts import HARD, SECTION, SOFT, Deadline

STEP, WARMUP = "step", "warmup"
_MAX_PAUSES = 64


class Watch:
    """The facts of one cycle of one rank.

    Args:
        settings: limits and counts as configured.
        start: how the cycle began; None between two cycles, when nothing is judged.
        now_ns: when the monitor heard of it.

    Raises:
        ProtocolError: `start` carries limits that are none.
    """

    def __init__(self, settings: MonitorSettings, start: CycleStart | None, now_ns: int) -> None:
        self._settings = settings
        self.start = start
        self.limits = Limits.configured(settings)
        if start is not None and start.limits is not None:
            self.limits = Limits.of_json(start.limits)
        self.ended = self._over = start is None
        self.replaced = start is not None and start.reconnect
        self.attached = self.replaced and start is not None and start.attached
        self.detached = False
        self.connected = False
        self.client_pid = 0
        self.lost_ns = now_ns
        self.last_sign_ns: int | None = None
        self.got_first_sign = False
        self.iteration = NO_ITERATION
        self.sections: dict[str, int] = {}
        self.wrapper = Wrapper()
        self._connect_armed = not self.replaced
        self._connect_since_ns = 0 if start is None else start.started_ns
        self._out_since_ns: int | None = None
        self._out_told = False
        self._detached_ns = 0
        self._warmup_steps = settings.num_warmup_iterations
        self._steps = 0
        self._last_step_ns = -1
        self._stamp_ns: int | None = None
        self._warned = False
        self._pauses: list[tuple[int, int]] = []

    # Facts.

    def note(self, message: Message, sent_ns: int, now_ns: int) -> None:
        """Takes a message of the rank.

        Raises:
            ProtocolError: it sets limits that are none, or guards with numbers that are none; nothing changed.
        """
        sent_ns = self._clamped(sent_ns, now_ns)
        match message:
            case Heartbeat():
                self.beat(sent_ns)
            case Sections():
                self._note_sections(message, sent_ns, now_ns)
            case IterationReached():
                self.iteration = message.iteration
                self.last_sign_ns = max(self.last_sign_ns or 0, sent_ns)
            case Progress():
                self._note_progress(self._clamped(message.stamp_ns, now_ns))
            case Hello():
                self._note_hello(message, sent_ns, now_ns)
            case Attach():
                self._note_attach(message, sent_ns)
            case LimitsSet():
                self.limits = Limits.of_message(message)
            case Guard():
                if self.wrapper.note(message, sent_ns):
                    self._begin_anew(sent_ns)
            case Ping():
                self.wrapper.ping(sent_ns)
            case Detach():
                self.attached, self.detached, self._detached_ns = False, True, sent_ns
                self._connect_armed = False

    def beat(self, sent_ns: int) -> None:
        """A sign of life, sent at a moment that is not in the future."""
        self.got_first_sign = True
        if self.last_sign_ns is None or sent_ns > self.last_sign_ns:
            self.last_sign_ns = sent_ns

    def lost(self, now_ns: int) -> None:
        """The connection closed; the rank lives."""
        self.connected = False
        self.lost_ns = now_ns

    def exited(self) -> None:
        """The rank's process is gone: nothing is judged, unless another process of the rank says hello."""
        self.ended, self.connected = True, False
        self.attached = self.detached = self._connect_armed = False
        self.wrapper = Wrapper()

    def end(self) -> None:
        """The launcher ends the cycle: nothing is judged until the next."""
        self.ended = self._over = True

    def pause(self, from_ns: int, until_ns: int) -> None:
        """Nobody could act in this stretch: it counts for no deadline that was running."""
        self._pauses.append((from_ns, until_ns))
        del self._pauses[:-_MAX_PAUSES]

    def warned(self) -> None:
        """The present stall was reported; the next progress arms the warning again."""
        self._warned = True

    def _clamped(self, moment_ns: int, now_ns: int) -> int:
        return min(max(moment_ns, self.start.started_ns if self.start else 0), now_ns)

    def _note_sections(self, message: Sections, sent_ns: int, now_ns: int) -> None:
        self.beat(sent_ns)
        if message.iteration != NO_ITERATION:
            self.iteration = message.iteration
        now_open = {name: self._clamped(since_ns, now_ns) for name, since_ns in message.open}
        if not now_open and (self.sections or not self._out_told):
            self._out_since_ns = sent_ns
        self._out_told = True
        self.sections = now_open
        if now_open.get(STEP, -1) > self._last_step_ns:
            self._last_step_ns = now_open[STEP]
            self._steps += 1

    def _note_progress(self, stamp_ns: int) -> None:
        if self._stamp_ns is None or stamp_ns > self._stamp_ns:
            self._stamp_ns = stamp_ns
            self._warned = False

    def _begin_anew(self, now_ns: int) -> None:
        """The training's function is called again: what is older is of a former call, and judged no more.

        Heartbeats and sections are judged again from the first of this call on.
        """
        self.sections = {name: since_ns for name, since_ns in self.sections.items() if since_ns > now_ns}
        if self.last_sign_ns is not None and self.last_sign_ns <= now_ns:
            self.last_sign_ns, self.got_first_sign = None, False
        if self._out_since_ns is not None and self._out_since_ns <= now_ns:
            self._out_since_ns, self._out_told = None, False
        if self.detached and self._detached_ns <= now_ns:
            self.detached = False
        self._connect_since_ns = now_ns

    def _note_hello(self, message: Hello, sent_ns: int, now_ns: int) -> None:
        self.wrapper.greet(message.guarded)
        same_process = message.pid in (self.client_pid, self.start.rank_pid if self.start else 0)
        self.connected, self.client_pid, self.ended = True, message.pid, self._over
        self._set_warmup(message.num_warmup_iterations)
        if message.attached:
            self.attached, self.detached = True, False
            self.got_first_sign = message.got_first_sign
            self.last_sign_ns = self._clamped(message.last_sign_ns, now_ns)
            self._connect_armed = False
        elif same_process:  # by its own word not watched: it shut its watch down, or became another program (exec)
            self.attached = False
        elif self.attached and self.last_sign_ns is None:
            self.last_sign_ns = sent_ns
        if self._out_since_ns is None:
            self._out_since_ns = self.last_sign_ns
        self._out_told = False  # what it says next of its sections is the truth, with the moment it became so

    def _note_attach(self, message: Attach, sent_ns: int) -> None:
        if self.attached or self.detached:  # begun anew: what was open is of the watch before
            self.sections = {}
        self.attached, self.detached, self.got_first_sign = True, False, False
        self.last_sign_ns = sent_ns
        self._connect_armed = False
        self._steps = 1 if STEP in self.sections else 0
        self._set_warmup(message.num_warmup_iterations)
        if not self.sections:
            self._out_since_ns = sent_ns

    def _set_warmup(self, steps: int | None) -> None:
        if steps is not None:
            self._warmup_steps = steps

    # Deadlines.

    def first_deadline(self) -> Deadline | None:
        """The soonest of all deadlines that hold now; None when nothing is judged."""
        return min(self._deadlines(), key=lambda deadline: deadline.at_ns, default=None)

    def stall(self) -> Deadline | None:
        """When the main thread will have stood still too long; None if that was reported or cannot be known."""
        if self.ended or self.detached or self._warned or not self.connected or self._stamp_ns is None:
            return None
        if (limit_s := self._settings.stall_warning) is None or self.wrapper.is_restarting:
            return None
        return self._deadline("stall", limit_s, max(self._stamp_ns, self.wrapper.since_ns))

    def _deadlines(self) -> list[Deadline]:
        if self.ended or self.start is None or self.wrapper.is_restarting:
            return []
        if self.wrapper.is_finalizing:
            hard_s = self.wrapper.said.hard_timeout_s
            return [self._deadline(HARD, hard_s, self.wrapper.since_ns, sign=END_OF_FINALIZE)]
        # A process that sends no stamps (it could start no thread) owes none; one that is cut off may hang.
        has_stamps = self._stamp_ns is not None or not self.connected
        owed, soft_s = self.wrapper.owed(has_stamps, self._stamp_ns or 0), self.wrapper.said.soft_timeout_s
        found = [self._deadline(SOFT, soft_s, since_ns, sign=sign) for sign, since_ns in owed]
        if self.detached:
            found += self._if_set("teardown", self._settings.teardown_timeout, self._detached_ns)
        elif self.attached:
            found += self._of_connection() + self._of_heartbeats() + self._of_sections()
        elif self._connect_armed:
            found += self._if_set("connect", self._settings.connect_timeout, self._connect_since_ns)
        return found

    def _of_connection(self) -> list[Deadline]:
        if self.connected:
            return []
        if self._settings.connect_timeout is not None or self.last_sign_ns is None:
            return self._if_set("reconnect", self._settings.connect_timeout or self.limits.largest, self.lost_ns)
        return self._if_set("reconnect", self.limits.largest, self.last_sign_ns)

    def _of_heartbeats(self) -> list[Deadline]:
        if self.last_sign_ns is None:
            return []
        if self.got_first_sign:
            return self._if_set("subsequent", self.limits.subsequent, self.last_sign_ns)
        return self._if_set("initial", self.limits.initial, self.last_sign_ns)

    def _of_sections(self) -> list[Deadline]:
        if self.sections:
            found = (self._of_section(name, since_ns) for name, since_ns in self.sections.items())
            return [deadline for deadline in found if deadline is not None]
        if self._out_since_ns is None or not self.limits.any_section:
            return []
        return self._if_set("out_of_section", self.limits.out_of_section, self._out_since_ns)

    def _of_section(self, name: str, since_ns: int) -> Deadline | None:
        by = name
        if name == STEP and self._steps <= self._warmup_steps:
            if self.limits.sections.get(WARMUP) is not None:
                by = WARMUP
            elif SECTION + STEP in self.limits.learned:
                return None
        limit_s = self.limits.sections.get(by)
        return None if limit_s is None else self._deadline(SECTION + by, limit_s, since_ns, name)

    def _if_set(self, limit: str, limit_s: float | None, since_ns: int) -> list[Deadline]:
        return [] if limit_s is None else [self._deadline(limit, limit_s, since_ns)]

    def _deadline(self, limit: str, limit_s: float, since_ns: int, section: str = "", sign: str = "") -> Deadline:
        at_ns = since_ns + nanoseconds(limit_s) + self.paused_since(since_ns)
        return Deadline(limit, limit_s, since_ns, at_ns, limit in self.limits.learned, section, sign)

    def paused_since(self, since_ns: int) -> int:
        """Nanoseconds of pauses after a moment."""
        return sum(until - max(start, since_ns) for start, until in self._pauses if until > since_ns)
