"""Adds up the events of the journal and the readings of the ranks to the state of the job on this node.

Pure but for a lock. The journal calls `NodeStatus.on_event` with each event as it is written, so that status, metrics
and journal cannot differ. `status_feed.py` puts in what monitors answered. The result is one `Facts`, which
`summary.py` turns into words and JSON.

Three kinds of trouble are told apart while ranks run. A rank that its monitor ends is *hung*: no stall replaces this
text, since the other ranks stand still because of that rank. A stall warning, or a verdict that condemns nobody, lasts
until ranks make steps again; the journal has no event of that, but the readings show it. A fault that is handled in
process lasts until the restart in process is reported.

Threads: any thread may write an event, and does so through `on_event`; the agent's thread calls `read` and `waits`;
threads of the servers call `facts` and `readings`. The lock is held for each of these calls.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from ft_launcher.record import events
from ft_launcher.tools.status.fault_scene import innermost, packed, scene_of
from ft_launcher.tools.status.memory_status import MemoryFacts

_MAX_FAULTS = 20
"""The last faults are kept with their texts: 40 KB at most. Counters count all faults."""
_MAX_TEXT = 2000
"""Characters of one text that a rank chose."""
_MAX_KINDS = 64
"""Different labels of one counter. Classes and kinds of faults are fewer, but a rank may send any word."""
_MAX_ENDS = 64
"""Cycles of which the end is kept. A page shows fewer."""
RECOVERY_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Bounds of the histogram of recoveries (seconds): a restart in process takes hundredths of a second, a lost node
minutes."""
RELAUNCH, IN_PROCESS = "relaunch", "in_process"
"""How a restart was made: recovery level 2, and recovery level 1. The words are labels of the metric `restarts`."""


@dataclass(frozen=True)
class RankReading:
    """What the monitor of a rank last answered about it.

    Attributes:
        read_at: when the monitor answered (monotonic seconds); None: it has not answered in this cycle.
        connected: the rank has connected to its monitor.
        attached: the rank has asked to be watched.
        iteration: the last iteration that the rank reported; -1: none.
        sections: open section -> its age at `read_at` (seconds).
        sign_age_s: the age of the rank's last sign of life at `read_at`; None: it gave none.
        condemned: the monitor ends the rank for an exceeded limit.
        frames: of the main thread, the innermost first, where stacks were asked for.
        process: the state of the process in /proc at that time.
        groups: how far the rank is in each process group, as `rank_monitor/flight_recorder.py: groups_of` has it.
            Empty: nobody asked for it in this cycle, or the rank has no flight recorder.
        groups_at: when the rank answered that (monotonic seconds).
    """

    rank: int
    local_rank: int
    pid: int
    read_at: float | None = None
    connected: bool = False
    attached: bool = False
    iteration: int = -1
    sections: Mapping[str, float] = field(default_factory=dict)
    sign_age_s: float | None = None
    condemned: bool = False
    frames: Sequence[str] = ()
    process: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, Any] = field(default_factory=dict)
    groups_at: float | None = None


@dataclass(frozen=True)
class Recoveries:
    """The durations of one phase of all recoveries.

    Attributes:
        count: how many there were.
        sum_s: their sum (seconds).
        within: for each of RECOVERY_BOUNDS_S, how many took at most so long.
    """

    count: int = 0
    sum_s: float = 0.0
    within: tuple[int, ...] = (0,) * len(RECOVERY_BOUNDS_S)

    def and_one(self, spent_s: float) -> Recoveries:
        """Returns the same with one more duration."""
        within = tuple(
            number + (spent_s <= bound) for number, bound in zip(self.within, RECOVERY_BOUNDS_S, strict=True)
        )
        return Recoveries(self.count + 1, self.sum_s + spent_s, within)


@dataclass(frozen=True)
class FaultSeen:
    """A fault of a rank of this node, and what was decided about it.

    Attributes:
        number: counts the faults of this node, from 1.
        t: when the event was written (seconds since 1970).
        kind, fault_class, what, where, hint, detail, others: as in the journal's event `fault`.
        next: the decision in words; empty: there is none yet.
        scene: where the ranks were, for `fault_scene.unpacked`; None: nothing hung, so it was not recorded.
        steps_lost: how many steps are computed again, as the ranks have found that look for state in memory; None: they
            have not looked since.
    """

    number: int
    t: float
    cycle: int
    rank: int
    kind: str
    fault_class: str
    what: str
    where: str
    hint: str
    detail: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    next: str = ""
    scene: bytes | None = None
    steps_lost: int | None = None


@dataclass(frozen=True)
class Facts:
    """The state of the job on this node, as far as events tell it.

    Attributes:
        job_name: what people call the job; its run id where the event has no name.
        started: when the job began here (seconds since 1970).
        cycle: the present or last cycle; None: none has begun.
        runs: whether ranks run now.
        waits: whether the coordinator lets this node wait while others run: it is a spare.
        trouble: why the job is not well now, in words; empty: it is well.
        stall_cause: whom the ranks of a stalled training wait for, in words; empty: not known.
        ended: whether the job is over.
        exit_code: the launcher's; None: the job goes on.
        end_reason: why the job is over.
        ends: cycle -> how it ended, for the last cycles.
        frames: rank -> the innermost frames of its main thread, as the last finding of this cycle has them.
        restarts: (RELAUNCH or IN_PROCESS, whether charged) -> how many.
        recoveries: phase -> durations, of the recoveries that are over.
        scores: rank -> the scores of its last report of straggler detection, `relative` and `individual`.
        health: check -> its last state, for checks that had something to report.
        exit_codes: rank -> exit code, for ranks of this cycle that have ended.
        memory: what is known of the training's state in memory.
    """

    run_id: str = ""
    job_name: str = ""
    node: str = ""
    started: float = 0.0
    max_restarts: int = 0
    cycle: int | None = None
    nodes: int = 1
    node_rank: int = 0
    runs: bool = False
    waits: bool = False
    trouble: str = ""
    stall_cause: str = ""
    ended: bool = False
    exit_code: int | None = None
    end_reason: str = ""
    ends: dict[int, str] = field(default_factory=dict)
    frames: Mapping[int, list[str]] = field(default_factory=dict)
    restarts_left: int | None = None
    faults: deque[FaultSeen] = field(default_factory=lambda: deque(maxlen=_MAX_FAULTS))
    faults_by: Counter[tuple[str, str]] = field(default_factory=Counter)
    restarts: Counter[tuple[str, bool]] = field(default_factory=Counter)
    cycle_ends: Counter[str] = field(default_factory=Counter)
    recoveries: dict[str, Recoveries] = field(default_factory=dict)
    scores: dict[int, dict[str, float]] = field(default_factory=dict)
    health: Mapping[str, str] = field(default_factory=dict)
    lines_dropped: int = 0
    monitors_replaced: int = 0
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    memory: MemoryFacts = field(default_factory=MemoryFacts)

    @property
    def fault_count(self) -> int:
        """How many faults there were, including those that are no longer kept."""
        return sum(self.faults_by.values())


class NodeStatus:
    """Keeps the state of one launcher's job. Any thread may call the methods; none of them blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._facts = Facts()
        """The state. Its counters, dictionaries and lists are changed in place; `facts` returns copies."""
        self._fault_number = 0
        self._scene: tuple[int, bytes] | None = None
        """The cycle and the packed scene of a hang. The event `fault` follows, and takes it."""
        self._readings: tuple[RankReading, ...] = ()
        self._hung = ""
        """The text about a rank that its monitor ends; empty: no rank is condemned."""
        self._is_stalled = False
        self._stalled_at: int | None = None
        """The lowest iteration of any rank when it was first read after the stall was reported. When all ranks are
        beyond it, the stall is over."""

    def on_event(self, event: events.Event, t: float) -> None:
        """Adds an event that was written at `t` (seconds since 1970)."""
        with self._lock:
            self._facts = self._after(event, t)

    def read(
        self, readings: Sequence[RankReading], stall_cause: str = "", saved: events.StatesSavedEvent | None = None
    ) -> None:
        """Stores the present readings of all ranks of this node.

        Args:
            stall_cause: whom the ranks wait for, where the training stalls and this is known.
            saved: what the ranks keep in memory now; None: nothing is known.
        """
        with self._lock:
            self._readings = tuple(readings)
            memory = self._facts.memory.with_present(saved)
            self._facts = replace(self._facts, stall_cause=stall_cause, memory=memory)
            iterations = [reading.iteration for reading in readings]
            if not self._is_stalled or not iterations:
                return
            if self._stalled_at is None:
                self._stalled_at = min(iterations)
            elif min(iterations) > self._stalled_at:  # all make steps again; no event says so
                self._is_stalled = False
                self._facts = replace(self._facts, trouble="", frames={})

    def waits(self, is_waiting: bool) -> None:
        """Notes whether this node waits for a place while others run. The begin of a cycle and the end of the job reset
        it."""
        with self._lock:
            self._facts = replace(self._facts, waits=is_waiting)

    @property
    def readings(self) -> tuple[RankReading, ...]:
        """The last readings."""
        with self._lock:
            return self._readings

    def facts(self) -> Facts:
        """Returns the present state, as a copy that nothing changes any more."""
        with self._lock:
            copies: dict[str, Any] = {name: copy(value) for name, value in vars(self._facts).items()}
            return Facts(**copies)

    def _after(self, event: events.Event, t: float) -> Facts:
        """Returns the state after an event. An event that this file does not know changes nothing."""
        facts = self._facts
        match event:
            case events.JobStartEvent():
                limit = event.max_restarts
                name = _text(event.job_name) or event.run_id
                facts = replace(facts, run_id=event.run_id, job_name=name, node=event.node, started=t)
                return replace(facts, max_restarts=limit, restarts_left=limit)
            case events.JobEndEvent():
                code, reason = event.exit_code, _text(event.reason)
                return replace(facts, ended=True, runs=False, waits=False, exit_code=code, end_reason=reason)
            case events.CycleStartEvent() | events.CycleEndEvent():
                return self._after_cycle(event)
            case events.RankExitEvent():
                return replace(facts, exit_codes={**facts.exit_codes, event.rank: event.exit_code})
            case events.StacksEvent():
                self._scene = event.cycle, packed(scene_of(event.ranks))
            case events.FaultEvent():
                return self._after_fault(event, t)
            case events.DecisionEvent():
                return self._after_decision(event)
            case (
                events.VerdictEvent()
                | events.StallEvent()
                | events.InProcessFaultEvent()
                | events.InProcessRestartEvent()
            ):
                return replace(facts, trouble=self._trouble(event), frames={**facts.frames, **_frames(event)})
            case events.SectionTimesEvent():
                found = {kind: events.score_of(event.sections, event.gpu, kind) for kind in ("relative", "individual")}
                facts.scores[event.rank] = {kind: score for kind, score in found.items() if score is not None}
            case events.LedgerEvent():
                return self._after_ledger(event)
            case events.StateLoadedEvent() | events.StatesSavedEvent():
                self._note_steps_lost(event)
                return replace(facts, memory=facts.memory.after(event))
            case events.HealthEvent() | events.HealthChangeEvent():
                return replace(facts, health=_health(facts.health, event))
            case events.MonitorReplacedEvent():
                return replace(facts, monitors_replaced=facts.monitors_replaced + 1)
            case events.LinesDroppedEvent():
                return replace(facts, lines_dropped=facts.lines_dropped + event.lines)
        return facts

    def _after_cycle(self, event: events.CycleStartEvent | events.CycleEndEvent) -> Facts:
        """Returns the state after the begin or the end of a cycle."""
        facts = replace(self._facts, cycle=event.cycle)
        if isinstance(event, events.CycleStartEvent):
            self._is_stalled, self._hung = False, ""
            facts = replace(facts, nodes=event.nodes, node_rank=event.node_rank, exit_codes={}, frames={}, scores={})
            return replace(facts, runs=True, waits=False, trouble="")
        facts.cycle_ends[event.how.partition(":")[0]] += 1
        facts.ends[event.cycle] = event.how
        if len(facts.ends) > _MAX_ENDS:
            del facts.ends[min(facts.ends)]
        if event.how == "failed elsewhere":
            return replace(facts, runs=False, trouble=_text(event.why))
        return replace(facts, runs=False)

    def _trouble(
        self, event: events.VerdictEvent | events.StallEvent | events.InProcessFaultEvent | events.InProcessRestartEvent
    ) -> str:
        """Returns why the job is not well after this event, while its ranks run; empty: it is well again.

        Counts faults and restarts in process along the way.
        """
        match event:
            case events.VerdictEvent() if event.condemned:
                self._is_stalled, self._hung = False, f"rank {event.rank} hangs: {_text(event.reason)}"
                return self._hung
            case events.VerdictEvent() | events.StallEvent() if self._hung:
                return self._hung  # the other ranks stand still since they wait for the condemned one
            case events.VerdictEvent():
                self._is_stalled, self._stalled_at = True, None
                return f"rank {event.rank} hangs: {_text(event.reason)}"
            case events.StallEvent():
                self._is_stalled, self._stalled_at = True, None
                return _text(event.what)
            case events.InProcessFaultEvent():
                self._hung = ""
                self._count_fault(event.fault_class or "unknown", IN_PROCESS)
                return f"rank {event.rank} {_text(event.what)}"
            case events.InProcessRestartEvent():
                self._facts.restarts[IN_PROCESS, False] += 1
                self._add_recovery("in_process", event.took_s)
        return ""

    def _after_fault(self, event: events.FaultEvent, t: float) -> Facts:
        """Returns the state after a fault that ended a cycle, with the scene that was recorded for it."""
        self._count_fault(event.fault_class, event.kind)
        self._fault_number += 1
        scene = None
        if self._scene is not None and self._scene[0] == event.cycle:
            scene = self._scene[1]
        self._scene = None
        self._facts.faults.append(
            FaultSeen(
                self._fault_number,
                t,
                event.cycle,
                event.rank,
                event.kind,
                event.fault_class,
                _text(event.what),
                _text(event.where),
                _text(event.hint),
                tuple(map(_text, event.detail[:10])),
                tuple(map(_text, event.others[:10])),
                scene=scene,
            )
        )
        return replace(self._facts, runs=False, trouble=f"rank {event.rank} {_text(event.what)}")

    def _after_decision(self, event: events.DecisionEvent) -> Facts:
        """Returns the state after a decision. The last fault gets its words, unless it is of another cycle."""
        faults = self._facts.faults
        if faults and not faults[-1].next and faults[-1].cycle == event.cycle:
            following = f"{event.action}: {_text(event.reason)}"
            budget = _text(event.budget)
            if budget:
                following += f", {event.restarts_left} left; {budget}"
            faults[-1] = replace(faults[-1], next=following)
        if event.action == "restart":
            self._facts.restarts[RELAUNCH, event.charged] += 1
        return replace(self._facts, runs=False, restarts_left=event.restarts_left)

    def _note_steps_lost(self, event: events.StateLoadedEvent | events.StatesSavedEvent) -> None:
        """Notes at the last fault how many steps it has cost, unless that is known or the fault is of a later cycle.
        An event about saves says nothing of that."""
        if isinstance(event, events.StatesSavedEvent):
            return
        faults = self._facts.faults
        if faults and faults[-1].steps_lost is None and faults[-1].cycle < event.cycle:
            faults[-1] = replace(faults[-1], steps_lost=event.steps_lost)

    def _after_ledger(self, event: events.LedgerEvent) -> Facts:
        """Returns the state after a ledger. Only the last ledger of a cycle has the whole recovery before that
        cycle."""
        if not event.has_ended:
            return self._facts
        for phase, spent_s in event.recovery.items():
            self._add_recovery(phase, spent_s)
        return self._facts

    def _count_fault(self, fault_class: str, kind: str) -> None:
        """Counts a fault by class and kind, unless there are too many different ones already."""
        counts = self._facts.faults_by
        if (fault_class, kind) in counts or len(counts) < _MAX_KINDS:
            counts[fault_class, kind] += 1

    def _add_recovery(self, phase: str, spent_s: float) -> None:
        """Adds the duration of one phase of a recovery."""
        recoveries = self._facts.recoveries
        if phase in recoveries or len(recoveries) < _MAX_KINDS:
            recoveries[phase] = recoveries.get(phase, Recoveries()).and_one(spent_s)


def _health(before: Mapping[str, str], event: events.HealthEvent | events.HealthChangeEvent) -> Mapping[str, str]:
    """Returns check -> its last state, after an event. `before`: as it was."""
    if isinstance(event, events.HealthChangeEvent):
        return {**before, event.check: event.state}
    return {str(reading["check"]): str(reading["state"]) for reading in event.readings}


def _text(value: object) -> str:
    """Returns a text with bounded length; empty where the event has none."""
    if not isinstance(value, str):
        return ""
    return value[:_MAX_TEXT]


def _frames(event: events.Event) -> dict[int, list[str]]:
    """Returns rank -> innermost frames, for the events that have them."""
    match event:
        case events.VerdictEvent():
            return {event.rank: innermost(event.frames)}
        case events.StallEvent():
            return {int(rank["rank"]): innermost(rank["frames"]) for rank in event.ranks}
    return {}
