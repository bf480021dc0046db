"""The cycles of a job as spans for tracing: a span for each cycle on this node, with its phases and faults. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ft_launcher.ledger.job_ledger import laid_out
from ft_launcher.record import events

Attributes: TypeAlias = Mapping[str, str | int | float]

_MOST_MOMENTS = 128
"""Of one span: OpenTelemetry's own default. A training that restarts in process for days has more."""
_MOST_TEXT = 2000
"""Characters of one text that a rank chose."""


@dataclass(frozen=True)
class Moment:
    """What happened at a time: seconds since 1970."""

    name: str
    t: float
    attributes: Attributes


@dataclass(frozen=True)
class Span:
    """A part of the job's time, from `since` to `until` (seconds since 1970)."""

    name: str
    since: float
    until: float
    attributes: Attributes = field(default_factory=dict)
    moments: Sequence[Moment] = ()
    parts: Sequence[Span] = ()
    error: str = ""


@dataclass(frozen=True)
class CycleSpan:
    """The span of a cycle on this node. `of` is equal on all nodes of the cycle, and on no other."""

    of: str
    span: Span


class CycleSpans:
    """Makes the span of each cycle from the events of the journal."""

    def __init__(self) -> None:
        self._run_id = ""
        self._open: dict[int, _OpenCycle] = {}

    def on_event(self, event: events.Event, t: float) -> CycleSpan | None:
        """Takes an event that was written at `t` (seconds since 1970). Returns the span of the cycle that it ends."""
        match event:
            case events.JobStart():
                self._run_id = event.run_id
            case events.CycleStart():
                # The ledger of the cycle before may still come; an older one was lost.
                self._open = {number: cycle for number, cycle in self._open.items() if number == event.cycle - 1}
                self._open[event.cycle] = _OpenCycle(event, t)
            case events.Ledger() if event.has_ended and event.cycle in self._open:
                return self._ended(self._open.pop(event.cycle), event)
            case events.Fault() if event.cycle in self._open:
                self._open[event.cycle].error = _short(event.what)
                self._open[event.cycle].note("fault", t, _of_fault(event) | {"limit": event.limit})
            case events.InProcessFault() if event.cycle in self._open:
                self._open[event.cycle].note("fault in process", t, _of_fault(event))
            case events.InProcessRestart() if event.cycle in self._open:
                facts = {"iteration": event.iteration, "took_s": event.took_s}
                self._open[event.cycle].note("restart in process", t, facts)
            case events.Decision() if event.cycle in self._open:
                decided = {"decision": event.action, "reason": event.reason}
                self._open[event.cycle].note("decision", t, decided)
            case events.CycleEnd() if event.cycle in self._open:
                self._open[event.cycle].note("end", t, {"how": event.how})
        return None

    def _ended(self, cycle: _OpenCycle, ledger: events.Ledger) -> CycleSpan:
        start = cycle.start
        facts: dict[str, str | int | float] = {
            "run_id": self._run_id,
            "cycle": start.cycle,
            "node_rank": start.node_rank,
            "nodes": start.nodes,
            "ranks": len(start.ranks),
            "steps": ledger.steps,
            "goodput": ledger.goodput,
        }
        facts |= {f"seconds.{category}": spent_s for category, spent_s in ledger.seconds.items()}
        since, parts = ledger.since, []
        for name, begin, length_s in laid_out(ledger.recovery, cycle.started):
            parts.append(Span(name, begin, begin + length_s))
            since = min(since, begin)  # detection and stop are in the time of the cycle before
        span = Span(f"cycle {start.cycle}", since, ledger.until, facts, tuple(cycle.moments), tuple(parts), cycle.error)
        return CycleSpan(f"{self._run_id} {start.cycle} {start.master}", span)


@dataclass
class _OpenCycle:
    start: events.CycleStart
    started: float
    moments: list[Moment] = field(default_factory=list)
    error: str = ""

    def note(self, name: str, t: float, attributes: Attributes) -> None:
        if len(self.moments) < _MOST_MOMENTS:
            self.moments.append(Moment(name, t, attributes))


def _of_fault(event: events.Fault | events.InProcessFault) -> dict[str, str | int | float]:
    facts: dict[str, str | int | float] = {"rank": event.rank, "class": event.fault_class}
    return facts | {"what": _short(event.what), "where": _short(event.where)}


def _short(text: str) -> str:
    return text[:_MOST_TEXT]
