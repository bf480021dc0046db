"""The state of a running job on this node: what the events of its journal add up to, and where its ranks are.

Pure but for a lock: the agent's thread and the journal's writers put in, the threads of the server read. The journal
gives each event to `on_event`, so that status, metrics and journal cannot differ.
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

_MAX_FAULTS = 20
"""The last ones are kept, with their texts: 40 KB at most. Counters have all."""
_MAX_TEXT = 2000
"""Characters of one text that a rank chose."""
_MAX_KINDS = 64
"""Different labels of one counter; classes and kinds of faults are fewer."""
_MAX_ENDS = 64
"""Cycles of which it is kept how they ended; a page shows fewer."""
RECOVERY_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""A restart in process takes hundredths of a second, a lost node minutes."""
RELAUNCH, IN_PROCESS = "relaunch", "in_process"


@dataclass(frozen=True)
class RankReading:
    """Where a rank was when its monitor was asked.

    Attributes:
        read_at: when it answered (monotonic seconds); None: it has not, in this cycle.
        iteration: the last one that it reported; -1: none.
        sections: that are open, with their age in seconds at `read_at`.
        sign_age_s: age of its last sign of life then; None: it gave none.
        frames: of its main thread, the innermost first, where stacks were asked for.
        process: its state in /proc, then.
        groups: how far it is in each process group, as `rank_monitor/flight_recorder.py: groups_of` has it; empty: that
            was not asked for in this cycle, or it has no flight recorder.
        groups_at: when it said so (monotonic seconds).
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
    """What one phase of all recoveries took. `within`: how many took at most so long, for each of RECOVERY_BOUNDS_S."""

    count: int = 0
    sum_s: float = 0.0
    within: tuple[int, ...] = (0,) * len(RECOVERY_BOUNDS_S)

    def and_one(self, spent_s: float) -> Recoveries:
        """Returns them with one more."""
        within = tuple(
            number + (spent_s <= bound) for number, bound in zip(self.within, RECOVERY_BOUNDS_S, strict=True)
        )
        return Recoveries(self.count + 1, self.sum_s + spent_s, within)


@dataclass(frozen=True)
class FaultSeen:
    """A fault of a rank of this node, and what followed.

    Attributes:
        number: counts the faults of this node, from 1.
        t: when it was written: seconds since 1970.
        next: the decision in words; empty: there is none yet.
        scene: where the ranks were, for `fault_scene.unpacked`; None: it was not recorded, since nothing hung.
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


@dataclass(frozen=True)
class Facts:
    """What the events add up to.

    Attributes:
        job_name: what people call it; its run id where the event has no name.
        started: when the job began here: seconds since 1970.
        cycle: the present or last cycle; None: none has begun.
        runs: ranks run now.
        trouble: why the job is not well now, in words; empty: it is.
        stall_cause: whom the ranks of a stalled training wait for, in words; empty: that is not known.
        ended: the job is over.
        exit_code: of the launcher; None: it goes on.
        end_reason: why it is over.
        ends: cycle -> how it ended, of the last ones.
        frames: rank -> the innermost frames of its main thread, as the last finding of this cycle had them.
        restarts: number by rung and by whether they were charged.
        recoveries: what each phase of the recoveries that are over took.
        scores: rank -> the scores of its last report of straggler detection, `relative` and `individual`.
        health: the last state of each check that had something to report.
        waits: the coordinator has let this node wait while others run.
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

    @property
    def fault_count(self) -> int:
        """How many faults there were, those included that are no longer kept."""
        return sum(self.faults_by.values())


class NodeStatus:
    """The state of one launcher's job. Any thread may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._facts = Facts()
        """What it counts and lists is added to in place; `facts` returns copies."""
        self._fault_number = 0
        self._scene: tuple[int, bytes] | None = None
        """Of a cycle that hung: its fault comes next."""
        self._readings: tuple[RankReading, ...] = ()
        self._hung = ""
        """What is said of the rank that its monitor ends; empty: of none."""
        self._is_stalled = False
        self._stalled_at: int | None = None
        """The lowest iteration of any rank when it was first read after the stall was reported."""

    def on_event(self, event: events.Event, t: float) -> None:
        """Takes an event that was written at `t` (seconds since 1970)."""
        with self._lock:
            self._facts = self._after(event, t)

    def read(self, readings: Sequence[RankReading], stall_cause: str = "") -> None:
        """Takes the present readings of all ranks of this node.

        Args:
            stall_cause: whom the ranks wait for, where the training is stalled and that is known.
        """
        with self._lock:
            self._readings = tuple(readings)
            self._facts = replace(self._facts, stall_cause=stall_cause)
            iterations = [reading.iteration for reading in readings]
            if not self._is_stalled or not iterations:
                return
            if self._stalled_at is None:
                self._stalled_at = min(iterations)
            elif min(iterations) > self._stalled_at:  # they go on, of which nothing is written to the journal
                self._is_stalled = False
                self._facts = replace(self._facts, trouble="", frames={})

    def waits(self, is_waiting: bool) -> None:
        """Notes whether this node waits for a place while others run. A cycle's begin and the job's end end that."""
        with self._lock:
            self._facts = replace(self._facts, waits=is_waiting)

    @property
    def readings(self) -> tuple[RankReading, ...]:
        """The last readings."""
        with self._lock:
            return self._readings

    def facts(self) -> Facts:
        """What is known now."""
        with self._lock:
            copies: dict[str, Any] = {name: copy(value) for name, value in vars(self._facts).items()}
            return Facts(**copies)

    def _after(self, event: events.Event, t: float) -> Facts:
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
            case events.HealthEvent():
                states = {str(reading["check"]): str(reading["state"]) for reading in event.readings}
                return replace(facts, health=states)
            case events.HealthChangeEvent():
                return replace(facts, health={**facts.health, event.check: event.state})
            case events.MonitorReplacedEvent():
                return replace(facts, monitors_replaced=facts.monitors_replaced + 1)
            case events.LinesDroppedEvent():
                return replace(facts, lines_dropped=facts.lines_dropped + event.lines)
        return facts

    def _after_cycle(self, event: events.CycleStartEvent | events.CycleEndEvent) -> Facts:
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
        """Returns why the job is not well while its ranks run; empty: it is again."""
        match event:
            case events.VerdictEvent() if event.condemned:
                self._is_stalled, self._hung = False, f"rank {event.rank} hangs: {_text(event.reason)}"
                return self._hung
            case events.VerdictEvent() | events.StallEvent() if self._hung:
                return self._hung  # ranks that wait for the one that is being ended stand still, too
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

    def _after_ledger(self, event: events.LedgerEvent) -> Facts:
        if not event.has_ended:
            return self._facts
        for phase, spent_s in event.recovery.items():
            self._add_recovery(phase, spent_s)
        return self._facts

    def _count_fault(self, fault_class: str, kind: str) -> None:
        counts = self._facts.faults_by
        if (fault_class, kind) in counts or len(counts) < _MAX_KINDS:
            counts[fault_class, kind] += 1

    def _add_recovery(self, phase: str, spent_s: float) -> None:
        recoveries = self._facts.recoveries
        if phase in recoveries or len(recoveries) < _MAX_KINDS:
            recoveries[phase] = recoveries.get(phase, Recoveries()).and_one(spent_s)


def _text(value: object) -> str:
    """A text of a rank, of bounded length; an absent one is empty."""
    if not isinstance(value, str):
        return ""
    return value[:_MAX_TEXT]


def _frames(event: events.Event) -> dict[int, list[str]]:
    """Returns the frames that a finding has, by rank."""
    match event:
        case events.VerdictEvent():
            return {event.rank: innermost(event.frames)}
        case events.StallEvent():
            return {int(rank["rank"]): innermost(rank["frames"]) for rank in event.ranks}
    return {}
