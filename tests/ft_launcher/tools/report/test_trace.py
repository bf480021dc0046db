"""Trace events for Perfetto and Chrome."""

from __future__ import annotations

import json

from ft_launcher.tools.report.findings import find
from ft_launcher.tools.report.trace import as_trace
from tests.ft_launcher.tools.report.lines import NODE_A, NODE_B, RECOVERY, collected


def test_cycles_phases_and_faults_of_each_node() -> None:
    collection = collected(NODE_A, NODE_B)
    findings = find(collection)
    assert findings is not None
    events = json.loads(json.dumps(as_trace(collection, findings)))["traceEvents"]
    nodes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert nodes == {"a": 1, "b": 2}
    cycles = [
        (event["name"], event["ts"], event["dur"])
        for event in events
        if event["ph"] == "X" and event["pid"] == 1 and event["name"].startswith("cycle")
    ]
    assert cycles == [
        ("cycle 0", 5_000_000, 25_000_000),
        ("cycle 1", 35_000_000, 26_000_000),
        ("cycle 0", 105_000_000, 26_000_000),
    ]
    phases = {
        event["name"]: event["dur"] / 1e6
        for event in events
        if event["ph"] == "X" and event["tid"] == 2 and event["pid"] == 1
    }
    assert phases == {phase: spent_s for phase, spent_s in RECOVERY.items() if spent_s}
    (start,) = [event["ts"] for event in events if event["name"] == "start" and event["pid"] == 1]
    assert start == 35_000_000
    faults = [(event["name"], event["pid"], event["ts"]) for event in events if event["ph"] == "i"]
    assert faults == [("signal", 2, 30_000_000), ("hang", 2, 59_000_000)]
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
