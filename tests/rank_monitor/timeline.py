"""A detector on an imaginary clock: what happens at which second, and what it does then."""

from __future__ import annotations

from dataclasses import fields, replace

from rank_monitor.contract.restart_phase import RestartPhase
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.codec import Received
from rank_monitor.contract.wire.launcher_messages import (
    CycleStart,
    HangOverdue,
    LogOverdue,
    LogStep,
    StopJudging,
    Verdict,
)
from rank_monitor.contract.wire.messages import (
    Attach,
    Detach,
    Heartbeat,
    Hello,
    IterationReached,
    LimitsSet,
    Message,
    Ping,
    Progress,
    RankException,
    RestartReport,
    Sections,
)
from rank_monitor.hang_detector import Action, AskUsualGap, HangDetector, SendVerdict
from tests.restart_reports import report

NO_LIMITS = MonitorSettings(
    initial_rank_heartbeat_timeout=None, rank_heartbeat_timeout=None, stall_warning=None, termination_grace_time=5.0
)
RANK_PID, STARTED_S = 700, 1000.0
ONE_OF_EACH: list[Message] = [
    Heartbeat(),
    Sections((("step", 0),)),
    Sections(()),
    IterationReached(3),
    Progress(0),
    Hello(RANK_PID),
    Hello(RANK_PID, attached=True),
    Attach(),
    LimitsSet(1.0, 1.0, {}, None),
    Detach(),
    RankException("E", "m", "t", 0.0),
    report("running", 60.0, 90.0, 5.0),
    report("closing", 60.0, 90.0, 5.0),
    Ping(),
    LogStep(3, 1, 0, 10**12),
    LogOverdue(10**12),
    HangOverdue(10.0, 11.0, "it waits"),
    StopJudging(),
]


def ns(second: float) -> int:
    """A moment in nanoseconds."""
    return round(second * 1e9)


def limited(base: MonitorSettings = NO_LIMITS, **values: object) -> MonitorSettings:
    """Settings with no limit but those named."""
    unknown = values.keys() - {field.name for field in fields(base)}
    assert not unknown, unknown
    return replace(base, **values)  # type: ignore[arg-type]


class Timeline:
    """A rank (pid 700, rank 3, cycle 1, started at second 1000) and its detector, which is woken as it asks to be."""

    def __init__(self, settings: MonitorSettings, **start: object) -> None:
        self.detector = HangDetector(settings)
        self.usual_gap_s: float | None = None
        self.asks_resolver = False
        self.now = STARTED_S
        self._report = report("none")
        begin = CycleStart(cycle=1, rank=3, rank_pid=RANK_PID, started_ns=ns(self.now), stack_file="")
        self.say(replace(begin, **start))  # type: ignore[arg-type]

    def say(self, message: Message, at: float | None = None, sent: float | None = None) -> list[Action]:
        """The detector hears a message at a second (default: now), sent then or earlier.

        A report of a wrapper that does not say when its phase began does so as a rank's does.
        """
        done = self.until(self.now if at is None else at, last=False)
        if isinstance(message, RestartReport):
            message = self._report = self._begun(message, ns(self.now if sent is None else sent))
        received = Received(message, 0, ns(self.now if sent is None else sent))
        return done + self._answered(self.detector.on_message(received, ns(self.now)), ns(self.now))

    def _begun(self, report: RestartReport, sent_ns: int) -> RestartReport:
        goes_on = report.phase is self._report.phase is RestartPhase.RUNNING
        if goes_on and not report.began_ns:
            return replace(report, began_ns=self._report.began_ns)
        return replace(report, began_ns=report.began_ns or sent_ns)

    def lose(self, at: float) -> list[Action]:
        """The connection of the rank breaks."""
        done = self.until(at, last=False)
        return done + self.detector.on_lost(ns(at))

    def attach(self, at: float | None = None) -> None:
        """The rank connects and asks to be watched."""
        self.say(Hello(RANK_PID), at)
        self.say(Attach())

    def open(self, *names: str, at: float | None = None) -> list[Action]:
        """These sections are open from now on, each since now unless it was before."""
        moment = self.now if at is None else at
        known = self.detector.watch.sections
        return self.say(Sections(tuple((name, known.get(name, ns(moment))) for name in names)), at)

    def until(self, at: float, last: bool = True) -> list[Action]:
        """Time passes; the detector is woken whenever it asked to be, at `at` itself only if `last`."""
        done: list[Action] = []
        while (due := self.detector.next_wake()) is not None and (due <= ns(at) if last else due < ns(at)):
            before = due, self.detector.state
            moment_ns = max(due, ns(self.now))
            done += self.tick(moment_ns)
            self.now = max(self.now, due / 1e9)
            assert (self.detector.next_wake(), self.detector.state) != before, "woken for nothing, again and again"
        self.now = at
        return done

    def sleep(self, at: float) -> list[Action]:
        """Time passes while the monitor stands still; it is woken then."""
        self.now = at
        return self.tick(ns(at))

    def tick(self, now_ns: int) -> list[Action]:
        """The detector is woken."""
        asks_resolver = self.asks_resolver and self.detector.needs_look_up(now_ns)
        return self._answered(self.detector.on_tick(now_ns, asks_resolver), now_ns)

    def _answered(self, actions: list[Action], now_ns: int) -> list[Action]:
        """The actions, those in place of `AskUsualGap` that follow from its answer."""
        found: list[Action] = []
        for action in actions:
            if isinstance(action, AskUsualGap):
                found += self.detector.on_usual_gap(self.usual_gap_s, now_ns)
            else:
                found.append(action)
        return found


def verdicts(actions: list[Action]) -> list[Verdict]:
    """The verdicts among actions."""
    return [action.verdict for action in actions if isinstance(action, SendVerdict)]


def verdict_of(line: Timeline, at: float) -> tuple[str, float]:
    """Limit and waited time of the one verdict that comes exactly at `at`."""
    assert verdicts(line.until(at - 0.001)) == []
    (verdict,) = verdicts(line.until(at))
    return verdict.limit, round(verdict.waited_s, 6)
