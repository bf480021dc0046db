"""Writes the cycles and faults of a job as trace events, which Perfetto and Chrome show. Pure.

`tools/commands/report.py` writes it to a file for `--trace`. The format is Chromium's "Trace Event Format", in its JSON
object form. Times are microseconds since the job began.

A node is a "process" of the trace, with three "threads", which are drawn as rows: cycles, phases of recoveries, faults.

Three kinds of events are used, by their field `ph`: X, a bar with begin and length; i, a moment, drawn through all
rows; M, the name of a process or row. Clocks of hosts differ: bars of two nodes are as far apart as their clocks say.
"""

from __future__ import annotations

from typing import Any

from ft_launcher.record.ledger.job_ledger import laid_out
from ft_launcher.tools.report.collection import Collection, Launch
from ft_launcher.tools.report.job_findings import JobFindings

_CYCLES, _PHASES, _FAULTS = 1, 2, 3
"""The rows of a node."""


def as_trace(collection: Collection, findings: JobFindings) -> dict[str, Any]:
    """Returns the object to write: one process for each journal, with cycles, phases of recoveries, and faults of its
    ranks.

    Args:
        collection: what was kept of the journals; cycles and phases come from here, for each node.
        findings: of the same journals; the faults come from here, each once for the job.
    """
    events: list[dict[str, Any]] = []
    pids: dict[str, int] = {}
    of_node: dict[str, int] = {}
    for launch in collection.launches:
        # A process is of a journal and not of a host name, which nodes in containers may share.
        if launch.source not in pids:
            pids[launch.source] = len(pids) + 1
            events += _names(pids[launch.source], launch.node)
        pid = pids[launch.source]
        of_node.setdefault(launch.node, pid)
        events += _cycles(launch, pid, findings.began)
        events += _phases(launch, pid, findings.began)
    for fault in findings.faults:
        facts = {"class": fault.fault_class, "rank": fault.rank, "what": fault.what, "cost_s": fault.cost_s}
        place = {"ph": "i", "s": "g", "pid": of_node.get(fault.node, 0), "tid": _FAULTS}
        events.append({"name": fault.kind, "ts": _micros(fault.t - findings.began), "args": facts} | place)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _names(pid: int, node: str) -> list[dict[str, Any]]:
    """Returns the events that name a process and its rows."""
    rows = ((_CYCLES, "cycles"), (_PHASES, "recovery"), (_FAULTS, "faults"))
    named = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": node}}]
    for row, name in rows:
        named.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": row, "args": {"name": name}})
    return named


def _cycles(launch: Launch, pid: int, began: float) -> list[dict[str, Any]]:
    """Returns the cycles of a launch. A cycle without an end is drawn until the last event of its launch."""
    found = []
    for number, cycle in launch.cycles.items():
        ended = launch.until if cycle.ended is None else cycle.ended
        facts = {"ranks": cycle.ranks, "end": cycle.end_reason, "attempt": launch.attempt}
        found.append(_complete(f"cycle {number}", pid, _CYCLES, cycle.began - began, ended - cycle.began, facts))
    return found


def _phases(launch: Launch, pid: int, began: float) -> list[dict[str, Any]]:
    """Returns the phases of the recoveries before the cycles of a launch, one after the other."""
    found = []
    for part in launch.parts:
        cycle = None
        if part.cycle is not None:
            cycle = launch.cycles.get(part.cycle)
        if not part.recovery or cycle is None:
            continue
        for phase, moment, length_s in laid_out(part.recovery, cycle.began - began):
            found.append(_complete(phase, pid, _PHASES, moment, length_s, {}))
    return found


def _complete(name: str, pid: int, row: int, since: float, length_s: float, facts: dict[str, Any]) -> dict[str, Any]:
    """Returns one bar: an event with begin and length."""
    length = _micros(max(0.0, length_s))
    return {"ph": "X", "name": name, "pid": pid, "tid": row, "ts": _micros(since), "dur": length, "args": facts}


def _micros(seconds: float) -> int:
    """Returns seconds as whole microseconds."""
    return round(seconds * 1e6)
