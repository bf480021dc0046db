"""The span of a cycle: when it begins, what is in it, and what it is equal with on other nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ft_launcher.record import events
from ft_launcher.tools.status.trace_export import CycleSpans
from tests.ft_launcher.tools.status.test_node_status import CYCLE, START, decision, fault, ledger

END = events.CycleEndEvent(0, "failed")
AGAIN = replace(CYCLE, cycle=1, master="host-b:29500")


def spans(*written: tuple[float, events.Event]) -> list[ReadableSpan]:
    """The spans of these events, a cycle after its phases."""
    exporter = InMemorySpanExporter()
    cycles = CycleSpans(Resource({}), "1.0", SimpleSpanProcessor(exporter))
    for t, event in written:
        cycles.on_event(event, t)
    return list(exporter.get_finished_spans())


def seconds(time_ns: int | None) -> float:
    assert time_ns is not None
    return time_ns / 1e9


def test_a_cycle_that_failed_and_the_one_after_it() -> None:
    first = replace(ledger(0, None, 3), since=10.0, until=20.0, seconds={"step": 8.0})
    phases = {"detection": 2.0, "stop": 1.0, "rendezvous": 0.5, "start": 1.5, "first_step": 0.0}
    second = replace(ledger(1, None, 9), since=20.0, until=30.0, recovery=phases)
    failed, *parts, recovered = spans(
        *((1.0, START), (11.0, CYCLE), (18.0, fault()), (18.5, decision()), (19.0, END), (20.0, first)),
        *((21.0, AGAIN), (30.0, second)),
    )
    assert failed.context.trace_id != recovered.context.trace_id
    assert (failed.name, seconds(failed.start_time), seconds(failed.end_time)) == ("cycle 0", 10.0, 20.0)
    assert (failed.status.is_ok, failed.status.description) == (False, "hangs")
    assert [(moment.name, seconds(moment.timestamp)) for moment in failed.events] == [
        ("fault", 18.0),
        ("decision", 18.5),
        ("end", 19.0),
    ]
    assert failed.events[0].attributes["ft_launcher.class"] == "hang"
    assert failed.attributes["ft_launcher.seconds.step"] == 8.0
    assert recovered.status.is_ok
    assert [(part.name, seconds(part.start_time), seconds(part.end_time)) for part in parts] == [
        *(("detection", 17.5, 19.5), ("stop", 19.5, 20.5), ("rendezvous", 20.5, 21.0)),
        ("start", 21.0, 22.5),
    ]
    assert {part.parent.span_id for part in parts} == {recovered.context.span_id}
    assert seconds(recovered.start_time) == 17.5, "the recovery began before the time of its cycle"


def test_a_ledger_that_comes_after_the_next_start() -> None:
    found = spans((1.0, START), (2.0, CYCLE), (9.0, AGAIN), (9.1, ledger(0, None, 3)), (12.0, ledger(1, None, 4)))
    assert [one.name for one in found] == ["cycle 0", "cycle 1"]


@pytest.mark.parametrize(
    "event", [fault(), decision(), END, ledger(0, None, 3), replace(ledger(0, None, 3), cycle=None)]
)
def test_what_belongs_to_no_cycle_that_runs_is_left_out(event: events.Event) -> None:
    assert spans((1.0, START), (2.0, event)) == []


def test_a_part_of_a_cycle_that_goes_on_is_no_span() -> None:
    assert spans((1.0, START), (2.0, CYCLE), (600.0, replace(ledger(0, None, 3), has_ended=False))) == []


def test_what_ranks_chose_is_bounded() -> None:
    long = fault(what="x" * 100_000, where="y" * 100_000)
    (found,) = spans((1.0, START), (2.0, CYCLE), *[(3.0, long)] * 1000, (4.0, ledger(0, None, 3)))
    assert len(found.events) == 128
    assert {len(str(value)) for value in found.events[0].attributes.values()} <= {2000, *range(10)}
    assert len(found.status.description) == 2000
