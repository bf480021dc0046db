"""Journals of jobs whose faults were decided by the real machines, as lines that a test may change."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ft_launcher.agent.in_process.recovery_level import RecoveryLevels, RecoveryState
from ft_launcher.agent.in_process.recovery_record import is_recorded, to_record
from ft_launcher.agent.in_process.recovery_steps import Died, Happened, LossNotified, Reported, Restarted, StartAgain
from ft_launcher.decide.attribution import Fault, RankEvidence, cycle_evidence
from ft_launcher.decide.attribution.cycle_evidence import CycleEvidence
from ft_launcher.decide.attribution.first_failure import find_fault
from ft_launcher.decide.policy.ended_cycle import CycleLife
from ft_launcher.decide.policy.restart_policy import Question, after_request, answer, inputs_of
from ft_launcher.record import events
from ft_launcher.record.journal_reader import Problems, parse
from ft_launcher.tools.replay.replay import Replay
from rank_monitor.contract.restart_history import History
from rank_monitor.contract.settings.config import RestartSettings
from rank_monitor.contract.wire.launcher_messages import Snapshot
from rank_monitor.contract.wire.messages import ControlRequest, RankException
from tests.restart_reports import report

Line = dict[str, Any]

ERROR = RankException("ValueError", "bad batch", 'File "train.py", line 3, in step\nValueError: bad batch\n', 5.0)
SNAPSHOT = Snapshot(1, True, True, 7, {"step": 0.5}, 0.5)


def line(event: events.Event, t: float = 1.0) -> Line:
    """An event as a line of a journal, through JSON."""
    found: Line = json.loads(json.dumps({"v": event.v, "t": t, "event": event.event, **event.facts()}))
    return found


def begins(cycle: int, nodes: int = 1) -> Line:
    return line(events.CycleStartEvent(cycle, 0, nodes, "host:1", [{"rank": 0, "local_rank": 0, "pid": 100}]))


START = line(events.JobStartEvent("run", "a", [], 2, 2, {}))


def crashed(number: int, at: float = 10.0) -> CycleEvidence:
    """Of two ranks: one raised an exception, the other was stopped for it."""
    first = RankEvidence(0, 0, 100, 1, at, exception=ERROR, exception_at=at - 0.1, snapshot=SNAPSHOT)
    second = RankEvidence(1, 1, 101, -15, at + 2.0, snapshot=SNAPSHOT)
    return CycleEvidence([first, second], stop_began=at + 1.0, on_purpose={1: "injected"} if number else {})


def fault_in(evidence: CycleEvidence) -> Fault:
    fault = find_fault(evidence, lambda error: None)
    assert fault is not None
    return fault


class Job:
    """One node's journal, whose faults the restart policy decides about. The time is the number of the cycle."""

    def __init__(self, max_restarts: int = 2, **settings: Any) -> None:
        self.lines = [START]
        self._settings = RestartSettings(**settings)
        self._max_restarts = max_restarts
        self._history = History()
        self._cycle = 0

    def fails(self) -> Job:
        """A cycle that fails, and the decision."""
        cycle, now = self._cycle, float(self._cycle)
        self._cycle += 1
        evidence = crashed(cycle)
        fault, life = fault_in(evidence), CycleLife(0.5, 7)
        asked = Question(self._settings, self._max_restarts, self._history, life)
        decided, self._history = answer(fault, asked, now)
        self.lines += [
            begins(cycle),
            line(events.EvidenceEvent(cycle, None, **cycle_evidence.to_record(evidence))),
            line(events.FaultEvent.of(fault, cycle=cycle)),
            line(events.DecisionEvent.of(decided, cycle=cycle, inputs=inputs_of(fault, asked, now))),
            line(events.CycleEndEvent(cycle, "failed")),
        ]
        return self

    def is_asked(self) -> Job:
        """A cycle that a rank ends."""
        request = ControlRequest("restart", "I like it")
        asked = Question(self._settings, self._max_restarts, self._history)
        decided = after_request(request, 1, asked, 0.0)
        inputs = asked.to_record(0.0) | {"request": {"rank": 1} | vars(request)}
        self.lines += [begins(self._cycle), line(events.DecisionEvent.of(decided, cycle=self._cycle, inputs=inputs))]
        self._cycle += 1
        return self


def in_process() -> list[Line]:
    """The last of three ranks dies, the others restart, and it is started again alone."""
    levels = RecoveryLevels(RecoveryState.at_start(range(3), True, {16, 17}))
    lines, now = [START, begins(0)], 100.0

    def happens(happened: Happened) -> None:
        nonlocal now
        known, now = levels.known(), now + 0.25
        steps = levels.on(happened, now)
        if is_recorded(happened, known, steps):
            lines.append(line(events.InProcessDecisionEvent(0, **to_record(happened, known, steps, now))))
        for step in steps or []:
            if isinstance(step, Restarted):
                lines.append(line(events.InProcessRestartEvent(0, step.number, step.took_s, [])))
            elif isinstance(step, StartAgain):
                lines.append(line(events.StartedAgainEvent(0, step.local_rank, step.local_rank, 103)))

    def say(phase: str, number: int, *ranks: int) -> None:
        for rank in ranks:
            happens(Reported(rank, report(phase, entry_rank=rank, round=number)))

    say("assigning", 0, 0, 1, 2)
    happens(Died(2, -9))
    say("recovering", 0, 0, 1)
    happens(LossNotified(2, ""))
    say("running", 1, 0, 1)
    return lines


def the(lines: Iterable[Line], event: str, number: int = 0) -> Line:
    """One of the lines of an event, to be changed."""
    return [found for found in lines if found["event"] == event][number]


def replayed(*journals: Iterable[Line]) -> Replay:
    """The replay of journals, which are named `0`, `1` and so on."""
    found = Replay()
    for number, lines in enumerate(journals):
        rows = [json.dumps(row).encode() + b"\n" for row in lines]
        found.add_journal(parse(rows, Problems(), str(number)), str(number))
    found.finish()
    return found
