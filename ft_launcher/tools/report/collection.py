"""Keeps what a report needs of the events of journals, one event at a time. Pure.

`tools/commands/report.py` and `tools/report/save_intervals.py` fill a `Collection`, and `findings.py` judges by it.
Memory grows with launches, cycles and faults, not with lines: of each cycle of a node one `ledger` is kept, of a fault
its facts, of the scores of a rank their mean.

Anyone may have written a journal. So a value of the wrong type is left out, a text is cut, and a moment or duration
beyond `_MAX_S` is refused: a report must come out whatever the file holds.
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
"""Lines that are kept of a traceback or a stack, and of what the other ranks did. A block on the console has no
more."""
_MAX_RANKS = 1 << 20
"""Largest number of a rank, and of nodes of a cycle, that is believed."""
_WITH_ALL_POINTS = 4
"""The lowest node ranks, of which all points are kept, since the account is made from the lowest one that has a cycle.
Points take 8 KB in each cycle of such a node. With all points of all nodes, a report on 128 nodes with 150 cycles took
490 MB; without, 170 MB."""
_LAST_POINTS = 8
"""Of all other nodes the last so many points are kept, and one in so many of the points before them."""
_MAX_S = 1e11
"""Seconds: until the year 5138. Sums of larger numbers may become infinite."""
NO_RANK = 1 << 30
"""The node rank of a launch that took part in no cycle: above all others."""

JOINS = JOINING.lower()
"""The kind of a restart in process by which a rank that was started again takes part. It is no fault."""
_HANG = "hang"
"""The name of a kind of fault, and of a class."""
_KINDS = {SOFT_TIMEOUT: _HANG, "HARD_TIMEOUT": _HANG, "UNRESPONSIVE": _HANG, "TERMINATED": "exit"}
"""Interruption of a restart in process -> kind of fault, where that kind has another name. All others keep their name,
in small letters."""

Line = dict[str, Any]


@dataclass
class NodeCycle:
    """One cycle on one node.

    Attributes:
        began: when its ranks ran (seconds since 1970).
        ranks: how many ranks it had on this node.
        nodes: how many nodes took part.
        ended: when it ended; None: the journal has no end of it.
        end_reason: how it ended, as the journal says; empty: not known.
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
        source: the file of the journal.
        attempt: the number of the attempt in the journal's events.
        since, until: the first and the last event (seconds since 1970).
        node_rank: the lowest one that the node had; NO_RANK: it took part in no cycle.
        parts: the parts of its time, in their order. A cycle that runs is written again and again; the last one counts.
        cycles: cycle -> what is known of it.
        exit_code: None: the launcher was killed, or still runs, or the code is no number.
        reason: why the launcher ended.
        has_ended: whether the journal has the event `job_end`.
        memory: cycle -> what was loaded and saved in memory, of cycles whose ranks looked for state.
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
    memory: dict[int, MemoryCycle] = field(default_factory=dict)


@dataclass(frozen=True)
class FaultEntry:
    """An event about a fault: `fault`, `in_process_fault`, `in_process_restart`, or `cycle_end` with `failed
    elsewhere`.

    Attributes:
        event: its name.
        launch: the launch whose journal has it.
        collateral: the rank failed since another rank had.
        took_s: of a restart in process: how long it took (seconds).
        detail, others: as in the event `fault`, 10 lines at most.
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
class MemoryCycle:
    """What a node says of state in memory in one cycle.

    Attributes:
        steps_lost: how many steps were lost in all when the ranks looked for state in the cycle; None: they did not, or
            nobody knows.
        first_steps_lost: that of their first look, which follows the fault before the cycle.
        tier, step: where it went on from; `none` and 0: from no state in memory.
        refused: how many generations were not used.
        saves, failed, cost_s: how many saves there were, how many failed, how long they held up the training (seconds).
        share: the share of the time that they took, without the first one; None: not known.
        size: bytes of a save of the node.
    """

    steps_lost: int | None = None
    first_steps_lost: int | None = None
    tier: str = ""
    step: int = 0
    refused: int = 0
    saves: int = 0
    failed: int = 0
    cost_s: float = 0.0
    share: float | None = None
    size: int = 0


@dataclass
class Score:
    """How fast a rank was, by the reports of straggler detection.

    Attributes:
        total: the sum of its scores.
        reports: how many there were.
    """

    total: float = 0.0
    reports: int = 0


class Collection:
    """Keeps what a report needs of the events of several journals.

    The events of one journal must come in their order; journals may come in any order, also mixed.

    Attributes:
        launches: in the order in which their first event came.
        faults: in the order in which their events came.
        scores: by rank.
        sections: how long sections took, and their limits.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.faults: list[FaultEntry] = []
        self.scores: dict[int, Score] = {}
        self.sections = SectionLimits()
        self._present: dict[str, Launch] = {}

    def add(self, entry: JournalEntry) -> None:
        """Adds an event. Events that a report does not use only extend the time of their launch."""
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
            case "memory_loaded" | "memory_saved":
                _note_memory(launch, entry.event, facts)
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
        """Yields the time of each launch, for `ledger.attempts.account_of`."""
        for launch in self.launches:
            until = max([launch.until, *(part.until for part in launch.parts)])
            # What follows the last cycle ends with the job. The event about the job's end is written a moment later,
            # and that moment is no time of the job.
            if launch.has_ended and launch.parts and launch.parts[-1].cycle is None:
                until = launch.parts[-1].until
            yield LaunchTimes(launch.since, until, launch.node_rank, launch.parts)

    def _launch(self, entry: JournalEntry) -> Launch:
        """Returns the launch that an event belongs to. Another run id or attempt in the same file begins a new
        launch."""
        launch = self._present.get(entry.source)
        if launch is None or (launch.run_id, launch.attempt) != (entry.run_id, entry.attempt):
            launch = Launch(entry.source, entry.run_id, entry.node, entry.attempt, entry.t, entry.t)
            self.sections.ended(entry.source)
            self._present[entry.source] = launch
            self.launches.append(launch)
        return launch

    def _ledger(self, launch: Launch, entry: JournalEntry) -> None:
        """Adds a part of a launch's time, in place of an earlier one of the same cycle."""
        part = cycle_times(entry.facts)
        if part is None or not _is_possible(part):
            return
        if launch.node_rank >= _WITH_ALL_POINTS:
            part = replace(part, points=_fewer(part.points))
        launch.since = min(launch.since, part.since)
        self.sections.ledger(entry.source, part.since, entry.facts)
        # The ledger of a cycle that runs is written again and again; only the last one counts.
        while launch.parts and launch.parts[-1].since >= part.since:
            launch.parts.pop()
        launch.parts.append(part)

    def _cycle_start(self, launch: Launch, entry: JournalEntry) -> None:
        """Notes the begin of a cycle on one node."""
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
        """Notes the end of a cycle. An end with `failed elsewhere` is a fault on another node, whose journal may be
        missing."""
        cycle, reason = whole(entry.facts, "cycle"), text(entry.facts, "how")
        if cycle is None:
            return
        if cycle in launch.cycles:
            launch.cycles[cycle].ended = entry.t
            launch.cycles[cycle].end_reason = reason
        if reason == "failed elsewhere":
            self.faults.append(FaultEntry("cycle_end", launch, entry.t, cycle, what=text(entry.facts, "why")))

    def _section_times(self, facts: Mapping[str, Any]) -> None:
        """Adds the score of a rank from a report of straggler detection."""
        rank, sections, gpu = whole(facts, "rank"), facts.get("sections"), facts.get("gpu")
        if rank is None or not 0 <= rank < _MAX_RANKS:
            return
        score = score_of(sections, gpu, "relative")
        if score is not None:
            known = self.scores.setdefault(rank, Score())
            known.total += score
            known.reports += 1


def _note_memory(launch: Launch, event: str, facts: Mapping[str, Any]) -> None:
    """Notes where a cycle went on from (`memory_loaded`), or its saves once it is over (`memory_saved`).

    Of several looks in a cycle, as in restarts in process, the steps that were lost add up. The first one is what the
    fault before the cycle has cost.
    """
    cycle, lost = whole(facts, "cycle"), whole(facts, "steps_lost")
    if cycle is None:
        return
    known = launch.memory.setdefault(cycle, MemoryCycle())
    if event == "memory_saved":
        known.saves, known.failed = whole(facts, "saves") or 0, whole(facts, "failed") or 0
        known.cost_s, known.share = real(facts, "cost_s") or 0.0, real(facts, "share")
        known.size = whole(facts, "size") or 0
    else:
        if lost is not None:
            known.steps_lost = (known.steps_lost or 0) + max(0, lost)
        if not known.tier:
            known.first_steps_lost = lost
        known.tier, known.step = text(facts, "tier"), whole(facts, "step") or 0
        refused = facts.get("refused")
        if isinstance(refused, list):
            known.refused += len(refused)


def _fault(launch: Launch, entry: JournalEntry) -> FaultEntry:
    """Returns the entry for an event about a fault of a rank."""
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
    """Returns the first lines of the list `name`, each cut at 500 characters. What is no text is left out."""
    value = facts.get(name)
    if not isinstance(value, list):
        return ()
    return tuple(line[:_MAX_TEXT] for line in value[:_MAX_LINES] if isinstance(line, str))


def _fewer(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns the last points, near which restarts resume, and some of the points before them."""
    return [*points[:-_LAST_POINTS:_LAST_POINTS], *points[-_LAST_POINTS:]]


def _is_possible(part: CycleTimes) -> bool:
    """Returns whether all moments and durations of a part are believable."""
    figures = [part.since, part.until, part.saved_s or 0.0, *part.seconds.values(), *part.recovery.values()]
    figures += [spent_s for _, spent_s in part.points]
    return max(map(abs, figures)) <= _MAX_S


def _reason(reasons: object) -> tuple[int | None, str, str]:
    """Returns rank, kind and text of the first reason of a restart in process that is no consequence of another one.

    Args:
        reasons: the field `why` of the event `in_process_restart`.
    """
    if isinstance(reasons, list):
        for reason in reasons:
            if isinstance(reason, Mapping) and not reason.get(COLLATERAL):
                name = text(reason, "interruption")
                # The number that the rank had at entry, where it is known; else the number of that round.
                rank = whole(reason, "member")
                if rank is None:
                    rank = whole(reason, "rank")
                return rank, _KINDS.get(name, name.lower()), text(reason, "error")
    return None, "", ""


def whole(facts: Mapping[str, Any], name: str) -> int | None:
    """Returns the whole number `name`; None where there is none."""
    value = facts.get(name)
    if type(value) is int:
        return value
    return None


def text(facts: Mapping[str, Any], name: str) -> str:
    """Returns the text `name`, cut at 500 characters; empty where there is none."""
    value = facts.get(name)
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    return ""
