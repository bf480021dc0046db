"""Sends the cycles of a job as traces to an OpenTelemetry collector, by its SDK (the extra `otel`).

The SDK sends from a thread of its own, which holds a bounded number of spans; the training never waits for it. Where to
send to, with which headers and how long to try is in OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_ENDPOINT` and
the others), and so are a sampler and a service name.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context

from ft_launcher.record import events
from ft_launcher.status.spans import Attributes, CycleSpans, Span

logger = logging.getLogger("ft_launcher")

_GOODBYE_S = 2.0
"""How long the end of the job waits for the last spans. A collector in reach takes them within a tenth of a second."""
_SDK_LOGGER = "opentelemetry"


@contextlib.contextmanager
def sending(version: str) -> Iterator[Callable[[events.Event, float], None]]:
    """A context in which traces are sent. Gives the function to call with each event of the journal and its time."""
    ids = _IdsByCycle()
    facts = {"service.name": "ft_launcher", "service.version": version, "host.name": socket.gethostname()}
    resource = Resource.create(facts).merge(OTELResourceDetector().detect())  # what the user set wins
    provider = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_WarnsOnce(OTLPSpanExporter())))
    tracer = provider.get_tracer("ft_launcher", version)
    cycles = CycleSpans()

    def on_event(event: events.Event, t: float) -> None:
        found = cycles.on_event(event, t)
        if found is not None:
            ids.of = found.of
            _emit(tracer, found.span)

    sdk_logger = logging.getLogger(_SDK_LOGGER)
    level = sdk_logger.level
    if level == logging.NOTSET:
        sdk_logger.setLevel(logging.CRITICAL)  # it reports each failed try; `_WarnsOnce` says it once
    try:
        yield on_event
    finally:
        ending = threading.Thread(target=provider.shutdown, daemon=True, name="ft_traces_end")
        ending.start()
        ending.join(_GOODBYE_S)
        if ending.is_alive():
            logger.warning("the last traces were not taken within %.0f s and are lost", _GOODBYE_S)
        sdk_logger.setLevel(level)


class _IdsByCycle(RandomIdGenerator):
    """The spans of one cycle have the same trace id on every node, without a word between them."""

    def __init__(self) -> None:
        self.of = ""

    def generate_trace_id(self) -> int:
        return int.from_bytes(hashlib.sha256(self.of.encode()).digest()[:16], "big")


class _WarnsOnce(SpanExporter):
    """Says the first failure in a line, and the next one only when a success was between them."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self._exporter = exporter
        self._failed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends them."""
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failed:
            logger.warning("traces cannot be sent (OTEL_EXPORTER_OTLP_ENDPOINT names where to); the training goes on")
        self._failed = failed
        return result

    def shutdown(self) -> None:
        """Closes the connection."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _emit(tracer: Tracer, span: Span, within: Context | None = None) -> None:
    started = tracer.start_span(span.name, within, attributes=_named(span.attributes), start_time=_ns(span.since))
    for moment in span.moments:
        started.add_event(moment.name, _named(moment.attributes), _ns(moment.t))
    if span.error:
        started.set_status(Status(StatusCode.ERROR, span.error))
    for part in span.parts:
        _emit(tracer, part, set_span_in_context(started))
    started.end(_ns(span.until))


def _named(attributes: Attributes) -> dict[str, str | int | float]:
    """Returns them under names that no other library has."""
    return {f"ft_launcher.{name}": value for name, value in attributes.items()}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
