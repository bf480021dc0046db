"""Goes through journals, has each decision made again, and keeps the differences. Pure: events in, findings out.

`tools/commands/replay.py` feeds it one journal after the other; `again.py` decides. The order of events in a journal
matters: a fault comes after its evidence, and a decision after its fault, so `_Journal` remembers what has come and is
used up by the next decision.

What cannot be decided again is counted with its reason, not reported as a difference: journals of earlier releases lack
inputs, journals of other nodes may be missing, and so may be the last lines of a launcher that was killed.

On several nodes one fault follows from the evidence of all nodes. So `add_journal` keeps the views of each node, and
`finish`, when all journals have been read, decides again from all of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ft_launcher.agent.in_process.recovery_record import NOTICE
from ft_launcher.decide.attribution.all_nodes import NodeScene
from ft_launcher.record import events
from ft_launcher.record.journal_reader import JournalEntry
from ft_launcher.tools.replay import again
from rank_monitor.contract.errors import ProtocolError

_MAX_TEXT = 300
"""Characters of a value in a line of text: some are texts of ranks."""

# What is decided again, as the lines of the report name it.
FAULT, DECISION, HISTORY = "fault", "decision", "history of restarts"
IN_PROCESS_FAULT, IN_PROCESS = "fault handled in process", "decision about a restart in process"
REQUEST, HEALTH = "request of a rank", "change of health"
IN_MEMORY = "decision about the state in memory"
FAULT_OF_ALL = "fault by the ranks of all nodes"

# Why something is not decided again.
_OLDER = "an earlier release wrote it, without what it was made of"
_NEWER = "a later release wrote it"
_NOT_ASKED = "its node decided without the restart policy"
_NO_FAULT = "the fault before it is missing"
_NO_DECISION = "the decision after it is missing"
_NO_EVIDENCE = "the evidence before it is missing"
_NO_FIT = "what it was made of does not fit"
_NO_INPUTS = "what it was made of is missing"
_OTHER_NODES = "the journals of all nodes are needed"
_TOO_MANY = "ranks have failed too often on several nodes at once"

_MAX_VIEWS = 100_000
"""Ranks that are kept at the ends of cycles of several nodes. Each takes 5 KB until the journals of all nodes have been
read."""

_Key = tuple[str, int, int]
"""Run id, number of the attempt in the journal, and cycle."""


@dataclass(frozen=True)
class Difference:
    """An event that would be another one now.

    Attributes:
        source, line: where it is in the journals.
        event: its name.
        what: what was decided again.
        fields: name -> what the journal says, and what is decided now.
    """

    source: str
    line: int
    cycle: int
    event: str
    what: str
    fields: Mapping[str, tuple[Any, Any]]

    def lines(self) -> list[str]:
        """Returns the difference in words: first where it is, then each field that differs."""
        found = [
            f"{self.source}:{self.line}: cycle {self.cycle}: event {self.event}: the {self.what} comes out otherwise"
        ]
        for name, (then, now) in self.fields.items():
            found.append(f"  {name}: then {_shown(then)}, now {_shown(now)}")
        return found


@dataclass
class _Journal:
    """What has been read so far of one journal, as far as later events need it.

    Attributes:
        run_id, attempt: of the launch whose events are being read.
        evidence: of the cycle that has just ended; None: the decision after it has been made.
        of_ranks: rank -> evidence, of ranks whose end recovery level 1 handled.
        fault: of the cycle that has just ended; None: the decision after it has been made.
        history: after the last decision of this journal; None: another node, or a missing line, may have changed it.
        health: check -> its state by the last event about it.
        nodes: how many nodes the present cycle has.
        expected: how many events must still follow from decisions about restarts in process.
    """

    run_id: str = ""
    attempt: int = 0
    evidence: JournalEntry | None = None
    of_ranks: dict[int, JournalEntry] = field(default_factory=dict)
    fault: JournalEntry | None = None
    history: dict[str, Any] | None = None
    health: dict[str, str] = field(default_factory=dict)
    nodes: int = 0
    expected: int = 0


class Replay:
    """Replays the journals of a job: `add_journal` for each, then `finish`. Then the attributes have the result.

    Attributes:
        same: what was decided again -> how often the result was the same.
        differences: the events that would be others now.
        left_out: what was not decided again, and why -> how often.
    """

    def __init__(self) -> None:
        self.same: Counter[str] = Counter()
        self.differences: list[Difference] = []
        self.left_out: Counter[tuple[str, str]] = Counter()
        self._journal = _Journal()
        self._scenes: dict[_Key, dict[str, NodeScene]] = {}
        self._kept_views = 0
        self._by_views: list[tuple[_Key, JournalEntry, JournalEntry | None, int, int]] = []

    def add_journal(self, journal: Iterable[JournalEntry], name: str) -> None:
        """Replays one journal.

        Args:
            journal: its events, of all its pieces, in their order.
            name: tells the journal from the others.
        """
        self._journal = _Journal()
        for entry in journal:
            known = events.EVENTS.get(entry.event)
            if known is not None and entry.v > known.v and entry.event in _DECIDED:
                self._leave_out(_DECIDED[entry.event], _NEWER)
                self._journal.history = None
            elif known is not None:
                self._on(entry, name)
        self._reset_fault()

    def finish(self) -> None:
        """Decides again about the faults that the ranks of several nodes show together. Called once, after all
        journals."""
        for key, fault, evidence, with_views, nodes in self._by_views:
            scenes = self._scenes.get(key, {})
            # The decision was made from the views of more or other nodes than those whose journals are here.
            if len(scenes) != with_views:
                self._leave_out(FAULT_OF_ALL, _OTHER_NODES)
                continue
            seen = list(scenes.values())
            own = evidence.facts if evidence is not None else None
            self._compare(FAULT_OF_ALL, fault, partial(again.culprits_by, seen, with_views >= nodes, fault.facts, own))

    def _on(self, entry: JournalEntry, name: str) -> None:
        """Handles one event of a known kind."""
        journal, facts = self._journal, entry.facts
        match entry.event:
            case events.JobStartEvent.event:
                self._begin(entry)
            # A new piece continues the launch, unless lines before it were lost or it belongs to another job.
            case events.JournalPieceEvent.event if facts.get("lost_bytes") or entry.run_id != journal.run_id:
                self._begin(entry)
            # Among the dropped lines there may have been decisions and changes of health.
            case events.LinesDroppedEvent.event:
                journal.history = None
                journal.health.clear()
            case events.CycleStartEvent.event:
                self._on_cycle_start(entry)
            case events.EvidenceEvent.event:
                self._on_evidence(entry, name)
            case events.InProcessDecisionEvent.event:
                self._on_in_process_decision(entry)
            case name if name in _OF_STEPS:
                self._on_step()
            case events.InProcessFaultEvent.event:
                self._on_in_process_fault(entry)
            case events.FaultEvent.event:
                journal.fault = entry
            case events.DecisionEvent.event:
                self._on_decision(entry)
            case events.CycleEndEvent.event:
                self._reset_fault()
            case events.HealthChangeEvent.event:
                self._on_health_change(entry)
            case events.StateFoundEvent.event:
                self._compare(IN_MEMORY, entry, lambda: again.state_found(facts))

    def _begin(self, entry: JournalEntry) -> None:
        """Begins a new launch, of which nothing has been read yet."""
        self._journal = _Journal(run_id=entry.run_id, attempt=self._journal.attempt + 1)

    def _on_cycle_start(self, entry: JournalEntry) -> None:
        """Notes the begin of a cycle. The history of restarts can only be followed in a job of one node."""
        journal = self._journal
        journal.nodes, journal.expected = _whole(entry.facts.get("nodes")), 0
        # The decisions of a job of several nodes are spread over the journals of all its nodes.
        if journal.nodes != 1:
            journal.history = None
        elif entry.facts.get("cycle") == 0:
            journal.history = again.FIRST_HISTORY

    def _on_evidence(self, entry: JournalEntry, name: str) -> None:
        """Keeps evidence until the decision that is made from it."""
        journal = self._journal
        if entry.facts.get("of_rank") is not None:
            journal.of_ranks[_whole(entry.facts["of_rank"])] = entry
            return
        journal.evidence = entry
        if journal.nodes <= 1:
            return
        if self._kept_views >= _MAX_VIEWS:
            self._leave_out(FAULT_OF_ALL, _TOO_MANY)
            return
        try:
            scene = again.scene_in(entry.facts, entry.node)
        except Exception:  # anyone may have written a journal
            self._leave_out(FAULT_OF_ALL, _NO_FIT)
            return
        self._kept_views += len(scene.views)
        self._scenes.setdefault(self._key(entry), {})[name] = scene

    def _on_in_process_fault(self, entry: JournalEntry) -> None:
        """Decides again who failed, for a rank whose end was handled in process."""
        evidence = self._journal.of_ranks.pop(_whole(entry.facts.get("rank")), None)
        if not entry.facts.get("fault_class"):
            return  # the launcher had killed the rank, and no fault was looked for
        if evidence is None:
            self._leave_out(IN_PROCESS_FAULT, _NO_EVIDENCE)
            return
        known = evidence.facts
        self._compare(IN_PROCESS_FAULT, entry, lambda: _fields(again.fault_by(known), "what", "where", "hint"))

    def _on_in_process_decision(self, entry: JournalEntry) -> None:
        """Decides again what follows for ranks that restart in process, and counts the events that must come from
        it."""
        facts, follows = entry.facts, entry.facts.get("follows")
        if isinstance(follows, list):
            self._journal.expected += sum(isinstance(step, Mapping) and step.get("step") != NOTICE for step in follows)
        self._compare(IN_PROCESS, entry, lambda: again.decision_in_process(facts))

    def _on_step(self) -> None:
        """Notes an event that must follow from a decision about a restart in process."""
        if self._journal.expected <= 0:
            self._leave_out(IN_PROCESS, _NO_INPUTS)
        else:
            self._journal.expected -= 1

    def _on_decision(self, entry: JournalEntry) -> None:
        """Decides again about the fault before this decision, and then the decision itself."""
        journal, facts = self._journal, entry.facts
        fault, evidence = journal.fault, journal.evidence
        journal.fault = journal.evidence = None
        inputs = facts.get("inputs")
        by_views, returned = 0, None
        if isinstance(inputs, Mapping):
            by_views, returned = _whole(inputs.get("by_views")), inputs.get("returned")
        if fault is not None and by_views > 0:
            self._by_views.append((self._key(entry), fault, evidence, by_views, journal.nodes))
        elif fault is not None and evidence is None:
            self._leave_out(FAULT, _NO_EVIDENCE)
        elif fault is not None and evidence is not None:
            known = evidence.facts
            self._compare(FAULT, fault, lambda: again.fault_by(known, returned))
        if not isinstance(inputs, Mapping):
            self._leave_out(DECISION, _NOT_ASKED if "inputs" in facts else _OLDER)
        elif "request" in inputs:
            self._compare(REQUEST, entry, lambda: again.decision_about_request(inputs))
        elif fault is None:
            self._leave_out(DECISION, _NO_FAULT)
            journal.history = None
        else:
            self._decide(entry, fault, inputs)

    def _decide(self, entry: JournalEntry, fault: JournalEntry, inputs: Mapping[str, Any]) -> None:
        """Decides again, and compares the history of restarts before the decision with the one that its inputs have."""
        before, self._journal.history = self._journal.history, None
        # The inputs of this decision must have the history that the last decision of this journal left.
        if before is not None:
            then = JournalEntry(entry.event, entry.v, entry.t, before, source=entry.source, line=entry.line)
            self._compare(HISTORY, then, lambda: again.history_in(inputs), _whole(entry.facts.get("cycle")))
        after: dict[str, Any] = {}

        def decided() -> dict[str, Any]:
            facts, history = again.decision_about(fault.facts, inputs)
            after.update(history)
            return facts

        self._compare(DECISION, entry, decided)
        # On several nodes the next decision may be in another journal.
        if after and self._journal.nodes == 1:
            self._journal.history = after

    def _on_health_change(self, entry: JournalEntry) -> None:
        """Decides again whether a check has changed."""
        check = str(entry.facts.get("check", ""))
        before = self._journal.health.get(check)
        self._compare(HEALTH, entry, lambda: again.health_change(entry.facts, before))
        self._journal.health[check] = str(entry.facts.get("state", ""))

    def _key(self, entry: JournalEntry) -> _Key:
        """Returns the cycle of an event, over all journals."""
        return self._journal.run_id, self._journal.attempt, _whole(entry.facts.get("cycle"))

    def _compare(
        self, what: str, entry: JournalEntry, decide: Callable[[], Mapping[str, Any] | None], cycle: int | None = None
    ) -> None:
        """Decides again, and compares the result with the facts of the event.

        Args:
            what: what is decided.
            entry: the event. Only the fields that `decide` returns are compared.
            decide: returns the facts as they would be now; None: the event would not be written.
            cycle: the cycle to name in a difference; by default the event's.
        """
        if cycle is None:
            cycle = _whole(entry.facts.get("cycle"))
        try:
            now = decide()
        except ProtocolError:
            self._leave_out(what, _NO_FIT)
            return
        except Exception as error:
            # The code fails now, where it decided then: that is a difference, too.
            now = {"error": f"{type(error).__name__}: {error}"}
        if now is None:
            differing: dict[str, tuple[Any, Any]] = {what: ("this one", "none")}
        else:
            differing = {
                name: (entry.facts.get(name), value) for name, value in now.items() if entry.facts.get(name) != value
            }
        if differing:
            self.differences.append(Difference(entry.source, entry.line, cycle, entry.event, what, differing))
        else:
            self.same[what] += 1

    def _reset_fault(self) -> None:
        """Drops a fault without a decision, at the end of a cycle or of a journal."""
        if self._journal.fault is not None:
            self._leave_out(FAULT, _NO_DECISION)
        self._journal.fault = self._journal.evidence = None

    def _leave_out(self, what: str, reason: str) -> None:
        """Counts something that is not decided again."""
        self.left_out[what, reason] += 1


# Event -> what is decided again from it. Read where an event has a version that this release does not know.
_DECIDED = {
    events.FaultEvent.event: FAULT,
    events.DecisionEvent.event: DECISION,
    events.InProcessDecisionEvent.event: IN_PROCESS,
    events.InProcessFaultEvent.event: IN_PROCESS_FAULT,
    events.HealthChangeEvent.event: HEALTH,
    events.StateFoundEvent.event: IN_MEMORY,
    events.EvidenceEvent.event: FAULT,
}


_OF_STEPS = {
    event.event
    for event in (
        *(events.InProcessRestartEvent, events.JoinedEvent, events.LateRankEndedEvent),
        *(events.StartedAgainEvent, events.StaysAwayEvent, events.TakenOverEvent),
    )
}
"""Events that follow from a step of a decision about a restart in process. Every step has one, except a notice to the
other ranks."""


def _fields(facts: Mapping[str, Any] | None, *names: str) -> Mapping[str, Any] | None:
    """Returns some of the facts, and the class of the fault."""
    if facts is None:
        return None
    return {name: facts[name] for name in (*names, "fault_class")}


def _whole(value: Any) -> int:
    """Returns a whole number; -1 for anything else, since anyone may have written a journal."""
    if type(value) is int:
        return value
    return -1


def _shown(value: Any) -> str:
    """Returns a value as it is shown: as JSON, cut at `_MAX_TEXT`."""
    text = json.dumps(value)
    if len(text) > _MAX_TEXT:
        return f"{text[:_MAX_TEXT]}..."
    return text
