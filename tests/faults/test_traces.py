"""Traces of a job, as a collector gets them: OTLP over HTTP, read by OpenTelemetry's own message classes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.faults.conftest import StartJob
from tests.faults.job import Place
from tests.faults.training import Plan, PlannedFault
from tests.ft_launcher.tools.status.test_node_status import CYCLE, START, ledger
from tests.ports import free_port


class Collector:
    """Takes traces at a port of this host."""

    def __init__(self) -> None:
        self.got: list[ExportTraceServiceRequest] = []
        got = self.got

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                got.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def resource(self) -> list[KeyValue]:
        """Who sent the traces."""
        return [fact for got in self.got for of in got.resource_spans for fact in of.resource.attributes]

    @property
    def spans(self) -> dict[str, list[Span]]:
        """What came, by name."""
        found: dict[str, list[Span]] = {}
        for got in list(self.got):
            for of in got.resource_spans:
                for span in [span for scope in of.scope_spans for span in scope.spans]:
                    found.setdefault(span.name, []).append(span)
        return found

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_each_cycle_is_a_trace(start_job: StartJob, collector: Collector) -> None:
    soon = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    plan = Plan((PlannedFault("SIGKILL", rank=1), PlannedFault("SIGKILL", iteration=6, rank=0)), hold=8)
    place = Place(environ=soon | {"OTEL_SERVICE_NAME": "train"})
    job = start_job(plan, 2, "--ft-otel-traces", "--max-restarts=2", place=place)
    job.until(lambda: {"cycle 0", "cycle 1"} <= collector.spans.keys(), "the cycles that failed have been sent")
    job.go()
    assert job.finish() == 0, job.tail()
    services = {fact.value.string_value for fact in collector.resource if fact.key == "service.name"}
    assert services == {"train"}
    (failed,), (recovered,) = collector.spans["cycle 0"], collector.spans["cycle 1"]
    for cycle in (failed, recovered):
        assert cycle.status.code == cycle.status.STATUS_CODE_ERROR and "SIGKILL" in cycle.status.message
        assert [event.name for event in cycle.events] == ["fault", "decision", "end"]
    assert failed.trace_id != recovered.trace_id
    phases = {
        span.name: span for found in collector.spans.values() for span in found if span.trace_id == recovered.trace_id
    }
    assert {"stop", "start"} <= phases.keys(), "detection may have taken no time, and is left out then"
    for name, phase in phases.items():
        if name != "cycle 1":
            assert phase.parent_span_id == recovered.span_id
        assert recovered.start_time_unix_nano <= phase.start_time_unix_nano <= phase.end_time_unix_nano


def test_nobody_there(start_job: StartJob) -> None:
    place = Place(environ={"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"})
    job = start_job(Plan((PlannedFault("SIGKILL", rank=1),)), 2, "--ft-otel-traces", "--max-restarts=1", place=place)
    assert job.finish() == 0, job.tail()
    told = [line for line in job.output.splitlines() if "traces" in line]
    assert 1 <= len(told) <= 2, "the launcher tells it at the failure, or at its end"
    assert "Traceback" not in job.output and "opentelemetry" not in job.output


def test_nodes_of_one_cycle_have_one_trace(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    from ft_launcher.tools.status.trace_export import sending

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    for _ in range(2):
        with sending("1.0") as on_event:
            for number, event in enumerate((START, CYCLE, ledger(0, None, 3))):
                on_event(event, 1000.0 + number)
    spans = collector.spans["cycle 0"]
    assert len(spans) == 2
    assert len({span.trace_id for span in spans}) == 1 and len({span.span_id for span in spans}) == 2
