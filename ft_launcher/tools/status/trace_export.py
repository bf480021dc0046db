"""Sends the cycles of a job as traces to an OpenTelemetry collector, by its SDK (the extra `otel`).

`listening.py` enters `sending` where traces are wanted, and makes its function a listener of the journal. Each cycle on
this node becomes a span, with the phases of the recovery before it as spans below it, and faults, decisions and
restarts in process as its events. All nodes give the spans of one cycle the same trace id.

A span is made when the ledger of its cycle is written, which is its end: until then only its moments are kept. The
address of the collector, headers, retries, sampler and service name are OpenTelemetry's own variables
(`OTEL_EXPORTER_OTLP_ENDPOINT` and others).

Threads: the SDK's thread sends, and holds a bounded number of spans, so the training never waits for a collector.
`ft_traces_end` closes it at the end of the job, which waits for that thread `_GOODBYE_S` at most. `CycleSpans.on_event`
runs in whatever thread writes an event of the journal.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Status, StatusCode, set_span_in_context

from ft_launcher.record import events
from ft_launcher.record.ledger.job_ledger import laid_out

logger = logging.getLogger("ft_launcher")

_GOODBYE_S = 2.0
"""How long the end of the job waits for the last spans (seconds). A collector in reach takes them within a tenth of a
second."""
_SDK_LOGGER = "opentelemetry"
"""The SDK's logger, which reports every failed attempt to send."""
_MAX_MOMENTS = 128
"""Events of one span: OpenTelemetry's own default. A training that restarts in process for days has more."""
_MAX_TEXT = 2000
"""Characters of a text that a rank chose."""

Attributes: TypeAlias = Mapping[str, str | int | float]


@contextlib.contextmanager
def sending(version: str) -> Iterator[Callable[[events.Event, float], None]]:
    """Context in which traces are sent. Gives the function to call with each event of the journal and its time.

    Blocks at the end for the last spans, `_GOODBYE_S` at most.
    """
    facts = {"service.name": "ft_launcher", "service.version": version, "host.name": socket.gethostname()}
    resource = Resource.create(facts).merge(OTELResourceDetector().detect())  # what the user set wins
    cycles = CycleSpans(resource, version, BatchSpanProcessor(_WarnsOnce(OTLPSpanExporter())))
    sdk_logger = logging.getLogger(_SDK_LOGGER)
    level = sdk_logger.level
    if level == logging.NOTSET:
        sdk_logger.setLevel(logging.CRITICAL)  # `_WarnsOnce` reports a failure once, the SDK every attempt
    try:
        yield cycles.on_event
    finally:
        ending = threading.Thread(target=cycles.provider.shutdown, daemon=True, name="ft_traces_end")
        ending.start()
        ending.join(_GOODBYE_S)
        if ending.is_alive():
            logger.warning("the last traces were not taken within %.0f s and are lost", _GOODBYE_S)
        sdk_logger.setLevel(level)


class CycleSpans:
    """Makes the spans of a cycle from the events of the journal. All times are seconds since 1970.

    Args:
        resource: the attributes of the process, which every span has.
        version: the version of the launcher.
        processor: gets the spans when they end.
    """

    def __init__(self, resource: Resource, version: str, processor: SpanProcessor) -> None:
        self._run_id = ""
        self._open: dict[int, _OpenCycle] = {}
        self._ids = _IdsByCycle()
        self.provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self.provider.add_span_processor(processor)
        self._tracer = self.provider.get_tracer("ft_launcher", version)

    def on_event(self, event: events.Event, t: float) -> None:
        """Adds an event that was written at `t`. The final ledger of a cycle ends its span."""
        match event:
            case events.JobStartEvent():
                self._run_id = event.run_id
            case events.CycleStartEvent():
                # The ledger of the cycle before may still come. An older open cycle has lost its ledger.
                self._open = {number: cycle for number, cycle in self._open.items() if number == event.cycle - 1}
                self._open[event.cycle] = _OpenCycle(event, t)
            case events.LedgerEvent() if event.has_ended and event.cycle in self._open:
                self._end(self._open.pop(event.cycle), event)
            case events.FaultEvent() if event.cycle in self._open:
                self._open[event.cycle].error = _short(event.what)
                self._open[event.cycle].note("fault", t, _of_fault(event) | {"limit": event.limit})
            case events.InProcessFaultEvent() if event.cycle in self._open:
                self._open[event.cycle].note("fault in process", t, _of_fault(event))
            case events.InProcessRestartEvent() if event.cycle in self._open:
                facts = {"iteration": event.iteration, "took_s": event.took_s}
                self._open[event.cycle].note("restart in process", t, facts)
            case events.DecisionEvent() if event.cycle in self._open:
                decided = {"decision": event.action, "reason": event.reason}
                self._open[event.cycle].note("decision", t, decided)
            case events.CycleEndEvent() if event.cycle in self._open:
                self._open[event.cycle].note("end", t, {"how": event.how})

    def _end(self, cycle: _OpenCycle, ledger: events.LedgerEvent) -> None:
        """Makes the span of a cycle, with its moments and the phases of the recovery before it, and ends all of
        them."""
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
        phases = list(laid_out(ledger.recovery, cycle.started))
        # Detection and stop belong to the time of the cycle before, so a recovery begins before `ledger.since`.
        since = min([ledger.since, *(begin for _, begin, _ in phases)])
        self._ids.of = f"{self._run_id} {start.cycle} {start.master}"
        span = self._tracer.start_span(f"cycle {start.cycle}", attributes=_named(facts), start_time=_ns(since))
        for name, t, attributes in cycle.moments:
            span.add_event(name, _named(attributes), _ns(t))
        if cycle.error:
            span.set_status(Status(StatusCode.ERROR, cycle.error))
        for name, begin, length_s in phases:
            phase = self._tracer.start_span(name, set_span_in_context(span), start_time=_ns(begin))
            phase.end(_ns(begin + length_s))
        span.end(_ns(ledger.until))


@dataclass
class _OpenCycle:
    """A cycle whose span has not been made yet.

    Attributes:
        start: the event of its begin.
        started: when that was written.
        moments: name, time and attributes of what happened in it.
        error: the text of its last fault; empty: no fault.
    """

    start: events.CycleStartEvent
    started: float
    moments: list[tuple[str, float, Attributes]] = field(default_factory=list)
    error: str = ""

    def note(self, name: str, t: float, attributes: Attributes) -> None:
        """Adds a moment, unless there are too many."""
        if len(self.moments) < _MAX_MOMENTS:
            self.moments.append((name, t, attributes))


class _IdsByCycle(RandomIdGenerator):
    """Gives the spans of one cycle the same trace id on every node, without a message between the nodes.

    `of` names the cycle: the run id, the number, and the address of its store, which differs between attempts.
    """

    def __init__(self) -> None:
        self.of = ""

    def generate_trace_id(self) -> int:
        """Returns the trace id of the cycle `of`: 16 bytes of a hash."""
        return int.from_bytes(hashlib.sha256(self.of.encode()).digest()[:16], "big")


class _WarnsOnce(SpanExporter):
    """Warns at the first failure to send, and again only after a success."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self._exporter = exporter
        self._failed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends spans, in the SDK's thread."""
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failed:
            logger.warning("traces cannot be sent (OTEL_EXPORTER_OTLP_ENDPOINT names where to); the training goes on")
        self._failed = failed
        return result

    def shutdown(self) -> None:
        """Closes the connection to the collector."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _named(attributes: Attributes) -> dict[str, str | int | float]:
    """Returns attributes with our prefix, so that no other library has the same names."""
    return {f"ft_launcher.{name}": value for name, value in attributes.items()}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _of_fault(event: events.FaultEvent | events.InProcessFaultEvent) -> dict[str, str | int | float]:
    """Returns the attributes of a fault."""
    facts: dict[str, str | int | float] = {"rank": event.rank, "class": event.fault_class}
    return facts | {"what": _short(event.what), "where": _short(event.where)}


def _short(text: str) -> str:
    """Returns a text of a rank with bounded length."""
    return text[:_MAX_TEXT]
