"""Defines the findings of the report as values: a job's time, faults, cycles, saves and slow ranks. Pure.

`findings.py` makes them from journals. Text, page, picture, trace and advice are made from them, and `ft_launcher
report -o FILE.json` writes them, so nothing here knows a journal. Beside them: durations and counts as people write
them, for every form of the report but its JSON, which has exact figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from ft_launcher.tools.report.section_durations import WatchedSection
from ft_launcher.tools.report.spares import Spares

VERSION = 1
"""Of the findings as JSON. It grows when a key goes or changes its meaning."""


@dataclass(frozen=True)
class FaultFindings:
    """One fault.

    Attributes:
        kind: `exception`, `signal`, `exit`, `hang`, what a restart in process was for, `node` (the node was lost, or
            its journal is missing) or `attempt` (the launchers were killed).
        rank: None: not known.
        node: the host of the rank; empty: not known.
        t: when it was written down (seconds since 1970).
        attempt: from 1.
        cycle: None: the attempt was killed.
        in_process: the ranks went on in the same processes.
        iteration: the round of the restart in process; -1: none.
        phases: phase -> seconds of its recovery.
        recovery_s: their sum.
        lost_s: seconds of steps that were done in vain for it.
        ranks: how many ranks the job had; 0: not known.
        rank_s: seconds of recovery and lost steps, times ranks.
        detail: lines of the traceback, or the frames of the rank that hangs, the innermost first.
        others: where the other ranks were, with their collectives; ranks at the same location are one line.
        steps_lost: how many steps were computed again, as the ranks found that looked for state in memory; None: they
            did not look.
        tier: where the training went on from; empty: not known.
    """

    kind: str
    fault_class: str
    rank: int | None
    node: str
    t: float
    attempt: int
    cycle: int | None
    in_process: bool
    iteration: int
    what: str
    hint: str
    phases: Mapping[str, float]
    recovery_s: float
    lost_s: float
    ranks: int
    rank_s: float
    detail: Sequence[str] = ()
    others: Sequence[str] = ()
    steps_lost: int | None = None
    tier: str = ""

    @property
    def cost_s(self) -> float:
        """Seconds that the job lost by it: recovery and lost steps."""
        return self.recovery_s + self.lost_s


@dataclass(frozen=True)
class ClassFindings:
    """All faults of one class.

    Attributes:
        mtbf_s: time of the job for each fault (seconds).
        mttr_s: mean recovery (seconds).
        cost_s: seconds that all of them cost.
    """

    name: str
    faults: int
    mtbf_s: float
    mttr_s: float
    cost_s: float


@dataclass(frozen=True)
class Saves:
    """The checkpoints of a job.

    Attributes:
        count: how many there were.
        mean_s: how long the training waited for one (seconds).
        interval_s: how long it trained between two (seconds).
    """

    count: int
    mean_s: float
    interval_s: float


@dataclass(frozen=True)
class MemoryFindings:
    """The training's state in memory.

    Attributes:
        loads: tier -> how many cycles went on from it; `none`: from no state in memory.
        steps_lost: steps that were computed again, in all.
        refused: generations that were not used.
        saves, failed: how many saves there were, and how many failed, of the node with the lowest number in each cycle.
        cost_s: for how long they held up the training (seconds).
        share: the largest share of the time that they took in a cycle, without the first save; None: not known.
        size: bytes of the last save of all nodes together.
    """

    loads: Mapping[str, int]
    steps_lost: int
    refused: int
    saves: int
    failed: int
    cost_s: float
    share: float | None
    size: int


@dataclass(frozen=True)
class CycleFindings:
    """A cycle, as the lowest node rank has it.

    Attributes:
        attempt: from 1.
        began, ended: of its ranks (seconds since 1970).
        end_reason: how it ended; empty: it runs, or its end is missing.
    """

    attempt: int
    cycle: int
    began: float
    ended: float
    end_reason: str


@dataclass(frozen=True)
class SlowRank:
    """A rank with its mean score of straggler detection: 0.5 is half as fast as the fastest rank."""

    rank: int
    score: float
    reports: int


@dataclass(frozen=True)
class JobFindings:
    """What the journals say of a job.

    Attributes:
        nodes: host names. Nodes in containers may share one, so `node_count` may be larger.
        began, ended: the first and the last event (seconds since 1970).
        exit_code: of the last attempt; None: it was killed, or still runs.
        seconds: category -> seconds; the sum is `wall_s`.
        goodput: share of the time that went into steps which count.
        goodput_saved: the same, of steps until the last checkpoint.
        faults: in the order of time.
        mtbf_s, mttr_s: mean time between faults, and mean recovery (seconds); None: there was no fault.
        node_faults: host name -> faults of its ranks, the most first.
        saves: None: no checkpoint is known.
        sections: how long sections took, beside their limits.
        cycles: in the order of time.
        spares: nodes that were lost, or waited; None: no cycle of several nodes is known.
        memory: None: the training kept no state in memory.
    """

    run_ids: Sequence[str]
    nodes: Sequence[str]
    node_count: int
    attempts: int
    ranks: int
    began: float
    ended: float
    exit_code: int | None
    reason: str
    wall_s: float
    seconds: Mapping[str, float]
    goodput: float
    goodput_saved: float
    steps: int
    faults: Sequence[FaultFindings] = ()
    classes: Sequence[ClassFindings] = ()
    mtbf_s: float | None = None
    mttr_s: float | None = None
    node_faults: Mapping[str, int] = field(default_factory=dict)
    saves: Saves | None = None
    slowest: Sequence[SlowRank] = ()
    sections: Sequence[WatchedSection] = ()
    cycles: Sequence[CycleFindings] = ()
    spares: Spares | None = None
    memory: MemoryFindings | None = None

    @property
    def cost_s(self) -> float:
        """Seconds that the job lost by all its faults."""
        return sum(fault.cost_s for fault in self.faults)

    def shares(self) -> list[tuple[str, float, float]]:
        """Returns category, seconds and share of the time, the longest first, without categories that took no time."""
        longest = sorted(self.seconds.items(), key=lambda item: (-item[1], item[0]))
        return [(name, spent_s, spent_s / self.wall_s) for name, spent_s in longest if spent_s > 0]

    def as_json(self) -> dict[str, Any]:
        """Returns the findings as JSON has them, with their version."""
        return {"version": VERSION} | asdict(self)


def moment(t: float) -> str:
    """Returns a moment (seconds since 1970) as local date and time of day: `2026-02-03 12:34:56`."""
    # A journal may hold a moment before the year 1, which has no date.
    return datetime.fromtimestamp(max(0.0, t)).isoformat(" ", "seconds")


def as_text(seconds: float) -> str:
    """Returns a duration in its two largest units: `3 h 12 min`, `14 min 5 s`, `4.2 s`, `31 ms`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return _pair(*divmod(whole, 60), "min", "s")
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return _pair(*divmod(minutes, 60), "h", "min")
    return _pair(*divmod(round(seconds / 3600), 24), "d", "h")


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: `1 fault`, `1,200 faults`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def _pair(large: int, small: int, of_large: str, of_small: str) -> str:
    """Returns a duration of two units, without the small one where it is 0."""
    if small:
        return f"{large} {of_large} {small} {of_small}"
    return f"{large} {of_large}"
