"""What a report needs of journals, taken from their events one by one. Pure.

`tools/commands/report.py` and `tools/report/save_intervals.py` fill it, `findings.py` judges by it. Memory grows with
launches, cycles and faults, and not with lines: of each cycle of each node one event `ledger` is kept, of a fault its
facts, of the timings of a rank their mean. Anyone may have written a journal: values that do not fit are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ft_launcher.record.events import EVENTS, score_of
from ft_launcher.record.journal_reader import JournalEntry
from ft_launcher.record.ledger.account import CycleTimes, cycle_times
from ft_launcher.record.ledger.attempts import LaunchTimes
from ft_launcher.tools.report.section_durations import SectionLimits
from rank_monitor.contract.rounds.escalation import COLLATERAL, JOINING, SOFT_TIMEOUT
from rank_monitor.contract.wire.json_record import real

_MAX_TEXT = 500
"""Characters of a text of a rank in a report."""
_MAX_LINES = 10
"""Lines kept of a traceback or a stack, and of what the other ranks did: a block on the console has no more."""
_MAX_RANKS = 1 << 20
_WITH_ALL_POINTS = 4
"""Node ranks whose points are all kept: the account is taken from the lowest one that has a cycle. Points take 8 KB in
each of its cycles: with all of them a report on 128 nodes with 150 cycles took 490 MB, else 170."""
_LAST_POINTS = 8
_MAX_S = 1e11
"""Seconds: until the year 5138. Sums of larger numbers may be no numbers any more."""
NO_RANK = 1 << 30
"""The node rank of a launch that took part in no cycle."""

JOINS = JOINING.lower()
"""The kind of a restart in process by which a rank that was started again takes part: it is no fault."""
_HANG = "hang"
"""A kind of fault, and a class."""
_KINDS = {SOFT_TIMEOUT: _HANG, "HARD_TIMEOUT": _HANG, "UNRESPONSIVE": _HANG, "TERMINATED": "exit"}
"""Interruptions that have the name of another fault's kind; others keep theirs, in small letters."""

Line = dict[str, Any]


@dataclass
class NodeCycle:
    """One cycle on one node.

    Attributes:
        began: when its ranks ran.
        ranks: how many they were on this node.
        nodes: how many took part.
        ended: None: its end is not in the journal.
    """

    began: float
    ranks: int
    nodes: int = 1
    ended: float | None = None
    end_reason: str = ""


@dataclass
class Launch:
    """One launch of the launcher on one node, as its journal has it.

    Attributes:
        parts: of its time, in their order; of a cycle that is written again and again the last one.
        exit_code: None: the launcher was killed, or still runs.
        has_ended: it has not; its exit code may be no number.
    """

    source: str
    run_id: str
    node: str
    attempt: int
    since: float
    until: float
    node_rank: int = NO_RANK
    parts: list[CycleTimes] = field(default_factory=list)
    cycles: dict[int, NodeCycle] = field(default_factory=dict)
    exit_code: int | None = None
    reason: str = ""
    has_ended: bool = False


@dataclass(frozen=True)
class FaultEntry:
    """A journal line about a fault: `fault`, `in_process_fault`, `in_process_restart`, or `cycle_end` elsewhere.

    `detail` and `others` are as in the event `fault`, with 10 lines at most.
    """

    event: str
    launch: Launch
    t: float
    cycle: int
    kind: str = ""
    fault_class: str = ""
    rank: int | None = None
    what: str = ""
    hint: str = ""
    collateral: bool = False
    iteration: int = -1
    took_s: float = 0.0
    detail: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


@dataclass
class Score:
    """How fast a rank was, by the reports of straggler detection: the sum of its scores, and how many there were."""

    total: float = 0.0
    reports: int = 0


class Collection:
    """Takes the events of each journal in their order, and keeps what a report needs. Journals may come in any order.

    Attributes:
        launches: in the order in which they came, as `faults`.
        scores: by rank.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.faults: list[FaultEntry] = []
        self.scores: dict[int, Score] = {}
        self.sections = SectionLimits()
        self._present: dict[str, Launch] = {}

    def add(self, entry: JournalEntry) -> None:
        """Takes an event."""
        if entry.event not in EVENTS or not abs(entry.t) <= _MAX_S:
            return
        launch = self._launch(entry)
        launch.until = max(launch.until, entry.t)
        facts = entry.facts
        match entry.event:
            case "job_start":
                configured = facts.get("limits")
                if isinstance(configured, Mapping):
                    self.sections.limits(entry.t, configured)
            case "ledger":
                self._ledger(launch, entry)
            case "cycle_start":
                self._cycle_start(launch, entry)
            case "cycle_end":
                self._cycle_end(launch, entry)
            case "job_end":
                launch.exit_code = whole(facts, "exit_code")
                launch.reason = text(facts, "reason")
                launch.has_ended = True
                self.sections.ended(entry.source)
            case "fault" | "in_process_fault" | "in_process_restart":
                self.faults.append(_fault(launch, entry))
            case "section_times":
                self._section_times(facts)
            case "printed_steps":
                self.sections.printed(facts)
            case "limits":
                self.sections.limits(entry.t, facts)
            case "verdict" | "interruption":
                if entry.event == "interruption" or facts.get("condemned") is True:
                    cycle = (entry.run_id, entry.attempt, whole(facts, "cycle"))
                    self.sections.fired(cycle, text(facts, "limit"))

    def times(self) -> Iterator[LaunchTimes]:
        """Yields the time of each launch, of which `ledger.attempts.account_of` makes the account."""
        for launch in self.launches:
            until = max([launch.until, *(part.until for part in launch.parts)])
            # What follows the last cycle ends with the job, and its last line is written a moment later.
            if launch.has_ended and launch.parts and launch.parts[-1].cycle is None:
                until = launch.parts[-1].until
            yield LaunchTimes(launch.since, until, launch.node_rank, launch.parts)

    def _launch(self, entry: JournalEntry) -> Launch:
        launch = self._present.get(entry.source)
        if launch is None or (launch.run_id, launch.attempt) != (entry.run_id, entry.attempt):
            launch = Launch(entry.source, entry.run_id, entry.node, entry.attempt, entry.t, entry.t)
            self.sections.ended(entry.source)
            self._present[entry.source] = launch
            self.launches.append(launch)
        return launch

    def _ledger(self, launch: Launch, entry: JournalEntry) -> None:
        part = cycle_times(entry.facts)
        if part is None or not _is_possible(part):
            return
        if launch.node_rank >= _WITH_ALL_POINTS:
            part = replace(part, points=_fewer(part.points))
        launch.since = min(launch.since, part.since)
        self.sections.ledger(entry.source, part.since, entry.facts)
        # Of a cycle that runs it is written again and again; the last one counts.
        while launch.parts and launch.parts[-1].since >= part.since:
            launch.parts.pop()
        launch.parts.append(part)

    def _cycle_start(self, launch: Launch, entry: JournalEntry) -> None:
        cycle, node_rank, ranks = whole(entry.facts, "cycle"), whole(entry.facts, "node_rank"), entry.facts.get("ranks")
        if cycle is None:
            return
        if node_rank is not None:
            launch.node_rank = min(launch.node_rank, node_rank)
        count = 0
        if isinstance(ranks, list):
            count = len(ranks)
        nodes = whole(entry.facts, "nodes") or 1
        launch.cycles[cycle] = NodeCycle(entry.t, count, min(nodes, _MAX_RANKS))

    def _cycle_end(self, launch: Launch, entry: JournalEntry) -> None:
        cycle, reason = whole(entry.facts, "cycle"), text(entry.facts, "how")
        if cycle is None:
            return
        if cycle in launch.cycles:
            launch.cycles[cycle].ended = entry.t
            launch.cycles[cycle].end_reason = reason
        if reason == "failed elsewhere":
            self.faults.append(FaultEntry("cycle_end", launch, entry.t, cycle, what=text(entry.facts, "why")))

    def _section_times(self, facts: Mapping[str, Any]) -> None:
        rank, sections, gpu = whole(facts, "rank"), facts.get("sections"), facts.get("gpu")
        if rank is None or not 0 <= rank < _MAX_RANKS:
            return
        score = score_of(sections, gpu, "relative")
        if score is not None:
            known = self.scores.setdefault(rank, Score())
            known.total += score
            known.reports += 1


def _fault(launch: Launch, entry: JournalEntry) -> FaultEntry:
    facts = entry.facts
    cycle = whole(facts, "cycle")
    if cycle is None:
        cycle = -1
    rank, kind, what = whole(facts, "rank"), text(facts, "kind"), text(facts, "what")
    fault_class = text(facts, "fault_class")
    if entry.event == "in_process_restart":
        rank, kind, what = _reason(facts.get("why"))
        if kind == _HANG:
            fault_class = _HANG
    iteration = whole(facts, "iteration")
    return FaultEntry(
        event=entry.event,
        launch=launch,
        t=entry.t,
        cycle=cycle,
        kind=kind,
        fault_class=fault_class,
        rank=rank,
        what=what,
        hint=text(facts, "hint"),
        collateral=facts.get("collateral") is True,
        iteration=-1 if iteration is None else iteration,
        took_s=min(_MAX_S, max(0.0, real(facts, "took_s") or 0.0)),
        detail=_lines(facts, "detail"),
        others=_lines(facts, "others"),
    )


def _lines(facts: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Returns the first lines of a list of texts, each cut at 500 characters; what is no text is left out."""
    value = facts.get(name)
    if not isinstance(value, list):
        return ()
    return tuple(line[:_MAX_TEXT] for line in value[:_MAX_LINES] if isinstance(line, str))


def _fewer(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The last points, near which restarts resume, and some of those before."""
    return [*points[:-_LAST_POINTS:_LAST_POINTS], *points[-_LAST_POINTS:]]


def _is_possible(part: CycleTimes) -> bool:
    figures = [part.since, part.until, part.saved_s or 0.0, *part.seconds.values(), *part.recovery.values()]
    figures += [spent_s for _, spent_s in part.points]
    return max(map(abs, figures)) <= _MAX_S


def _reason(reasons: object) -> tuple[int | None, str, str]:
    """The rank, the kind and the text of the first reason of a restart in process that is no consequence of another."""
    if isinstance(reasons, list):
        for reason in reasons:
            if isinstance(reason, Mapping) and not reason.get(COLLATERAL):
                name = text(reason, "interruption")
                # Its number at entry, if it is known; else the one that it had in that iteration.
                rank = whole(reason, "member")
                if rank is None:
                    rank = whole(reason, "rank")
                return rank, _KINDS.get(name, name.lower()), text(reason, "error")
    return None, "", ""


def whole(facts: Mapping[str, Any], name: str) -> int | None:
    """Returns a whole number; None: it is none."""
    value = facts.get(name)
    if type(value) is int:
        return value
    return None


def text(facts: Mapping[str, Any], name: str) -> str:
    """Returns a text, cut at 500 characters; empty: it is none."""
    value = facts.get(name)
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    return ""
