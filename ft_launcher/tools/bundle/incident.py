"""Adds up what a bundle says of a job, and writes the page that its reader opens first. Pure.

`tools/commands/bundle.py` gives it only what `allowed.py` let pass, and writes its page into the bundle. Even so a
journal may be malformed: a value that does not fit is left out, and no text can break out of its cell of a table.

The page is Markdown, which is readable as it is and which issue trackers show. It begins with what its reader asks
first: when, on which nodes, how it ended; then faults with their decisions, where the ranks were, collectives, health,
versions and settings; then what else is in the bundle. A part about which nothing is known is left out.

Memory is bounded by the limits below, however long the journals are: events come one by one, and only the latest of
each sort are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from ft_launcher.tools.status.fault_scene import scene_of
from rank_monitor.contract.rounds.barrier import ranges_of

Facts = Mapping[str, Any]

_MAX_FAULTS, _MAX_HANGS, _MAX_NODES, _MAX_CHANGES = 20, 3, 64, 20
"""How many of each are on the page: faults, hangs, nodes, changes of health. The latest ones; the journals in the
bundle have all."""
_MAX_TEXT = 200
"""Characters in a cell of a table."""


@dataclass(frozen=True)
class Seen:
    """An event of a node, as it may be passed on.

    Attributes:
        t: when it was written (seconds since 1970).
        node: the host that wrote it.
        facts: its fields.
    """

    t: float
    node: str
    facts: Facts


@dataclass
class Incident:
    """What is known of a job.

    Attributes:
        run_ids: of the events, in the order in which they came.
        nodes: node -> the event `job_start` of its launcher.
        began, ended: the first and the last event (seconds since 1970); None: there was none.
        exit_codes: node -> its launcher's exit code.
        faults, hangs, changes: the latest events of each sort; `changes` are those about health.
        decisions: node and cycle -> the decision.
        status: of the running job, as it may be passed on; empty: no job was asked.
        live: groups of ranks at the same location, of the running job.
        collectives: how far its ranks are in each process group.
    """

    run_ids: list[str] = field(default_factory=list)
    nodes: dict[str, Facts] = field(default_factory=dict)
    began: float | None = None
    ended: float | None = None
    exit_codes: dict[str, Any] = field(default_factory=dict)
    faults: deque[Seen] = field(default_factory=lambda: deque(maxlen=_MAX_FAULTS))
    decisions: dict[tuple[str, str], Facts] = field(default_factory=dict)
    hangs: deque[Seen] = field(default_factory=lambda: deque(maxlen=_MAX_HANGS))
    changes: deque[Seen] = field(default_factory=lambda: deque(maxlen=_MAX_CHANGES))
    status: Facts = field(default_factory=dict)
    live: Sequence[Facts] = ()
    collectives: Sequence[Facts] = ()

    def add(self, event: str, t: float, run_id: str, node: str, facts: Facts) -> None:
        """Adds an event, as it may be passed on. Events of other sorts than these count for the time only.

        Args:
            event: its name.
            t: when it was written (seconds since 1970).
            run_id: of the job; empty: not known.
            node: the host that wrote it.
            facts: its fields.
        """
        if run_id and run_id not in self.run_ids:
            self.run_ids.append(run_id)
        if self.began is None or t < self.began:
            self.began = t
        if self.ended is None or t > self.ended:
            self.ended = t
        seen = Seen(t, node, facts)
        match event:
            case "job_start":
                self.nodes[node] = facts
            case "job_end":
                self.exit_codes[node] = facts.get("exit_code")
            case "fault" | "in_process_fault":
                self.faults.append(seen)
            case "decision":
                self.decisions[node, str(facts.get("cycle"))] = facts
            case "stacks" | "stall":
                self.hangs.append(seen)
            case "health" | "health_change":
                self.changes.append(seen)


def page(incident: Incident, made: float, version: str, contents: Sequence[tuple[str, str]]) -> str:
    """Returns the page in Markdown.

    Args:
        made: when the bundle is written (seconds since 1970).
        version: the version of the launcher that writes it.
        contents: the files of the bundle, and what is in each.
    """
    lines = [
        f"# Incident: {', '.join(incident.run_ids) or 'a job'}",
        "",
        f"Written by ft_launcher {version} at {_time(made)}.",
        "",
        *_table(("what", ""), _summary(incident)),
        *_faults(incident),
        *_stacks(incident),
        *_collectives(incident),
        *_health(incident),
        *_surroundings(incident),
        "## Files",
        "",
        *_table(("file", "what is in it"), contents),
    ]
    return "\n".join(lines) + "\n"


def stacks(incident: Incident) -> str:
    """Returns where the ranks are, and where they were at the last hangs, as text; empty: nothing is known."""
    lines: list[str] = []
    if incident.live:
        lines += ["Now:", *_groups(incident.live), ""]
    for hang in incident.hangs:
        groups = _groups(_scene(hang)["stacks"])
        lines += [f"{_time(hang.t)}, {hang.node}, cycle {hang.facts.get('cycle')}:", *groups, ""]
    return "\n".join(lines)


def _summary(incident: Incident) -> list[tuple[str, str]]:
    """Returns the rows of the first table: time, nodes, state, exit codes."""
    rows = [
        ("events", f"{_time(incident.began)} to {_time(incident.ended)}"),
        ("nodes", ", ".join(sorted(incident.nodes)) or str(incident.status.get("node", "unknown"))),
    ]
    if incident.status:
        rows.append(("state", f"{incident.status.get('state')}, cycle {incident.status.get('cycle')}"))
    codes = [f"{code} on {node}" for node, code in sorted(incident.exit_codes.items())]
    rows.append(("exit code", ", ".join(codes) or "none: it runs, or was killed"))
    rows.append(("faults on this page", str(len(incident.faults))))
    return rows


def _faults(incident: Incident) -> list[str]:
    """Returns the table of faults, each with the decision about it; empty without faults.

    The decision about a fault is in the journal of the same node, with the same cycle. A fault that was handled in
    process has none.
    """
    if not incident.faults:
        return []
    rows = []
    for seen in incident.faults:
        facts = seen.facts
        decided = incident.decisions.get((seen.node, str(facts.get("cycle"))), {})
        follows = f"{decided.get('action', '')}: {decided.get('reason', '')}".strip(": ")
        what = str(facts.get("what", "handled in process"))
        if facts.get("hint"):
            what += f"; likely: {facts['hint']}"
        place = (_time(seen.t), seen.node, str(facts.get("cycle")), str(facts.get("rank")))
        rows.append((*place, str(facts.get("fault_class")), what, str(facts.get("where", "")), follows))
    head = ("when", "node", "cycle", "rank", "class", "what", "where", "what followed")
    return ["## Faults, the latest last", "", *_table(head, rows)]


def _stacks(incident: Incident) -> list[str]:
    """Returns the part of the page with stacks; empty where nothing is known."""
    text = stacks(incident)
    if not text:
        return []
    return ["## Where the ranks were", "", "```", *text.splitlines(), "```", ""]


def _collectives(incident: Incident) -> list[str]:
    """Returns how far the ranks are in each process group, or were at the last hang; empty where nothing is known."""
    title, found = "Collectives now", list(incident.collectives)
    if not found and incident.hangs:
        title = "Collectives at the last hang"
        found = _scene(incident.hangs[-1])["collectives"]
    if not found:
        return []
    rows = []
    for row in found:
        cells = [row.get(name) for name in ("group", "entered", "finished", "operation", "shape")]
        rows.append((_numbered(row.get("ranks")), *map(str, cells)))
    head = ("ranks", "group", "entered", "finished", "collective that they are in, or were in last", "tensors")
    return [f"## {title}", "", *_table(head, rows)]


def _health(incident: Incident) -> list[str]:
    """Returns the table of health checks that had something to report; empty without any."""
    rows = []
    for seen in incident.changes:
        for reading in _readings(seen.facts):
            rows.append((_time(seen.t), seen.node, str(reading.get("check")), str(reading.get("state"))))
    if not rows:
        return []
    return ["## Health", "", *_table(("when", "node", "check", "state"), rows[-_MAX_CHANGES:])]


def _readings(facts: Facts) -> list[Facts]:
    """Returns the readings of an event about health; none where the event does not fit."""
    readings = facts.get("readings", [facts])
    if not isinstance(readings, list):
        return []
    return [reading for reading in readings if isinstance(reading, Mapping)]


def _surroundings(incident: Incident) -> list[str]:
    """Returns tables of versions, environment and limits, one row for each node."""
    lines = []
    for title, name in (("Versions", "versions"), ("Environment", "environment"), ("Limits in seconds", "limits")):
        rows = []
        for node, facts in sorted(incident.nodes.items())[:_MAX_NODES]:
            found = facts.get(name)
            if isinstance(found, Mapping) and found:
                rows.append((node, ", ".join(f"{key}={value}" for key, value in found.items())))
        if rows:
            lines += [f"## {title}", "", *_table(("node", ""), rows, most=4 * _MAX_TEXT)]
    return lines


def _scene(hang: Seen) -> dict[str, Any]:
    """Returns where the ranks were at a hang; an empty scene where the event does not fit."""
    try:
        return scene_of(hang.facts.get("ranks", []))
    except (AttributeError, KeyError, TypeError, ValueError):
        return {"stacks": [], "collectives": []}


def _numbered(ranks: Any) -> str:
    """Returns ranks in words, such as `0-3, 7`; empty where they are no list."""
    if not isinstance(ranks, (list, tuple)):
        return ""
    return ranges_of(rank for rank in ranks if type(rank) is int)


def _groups(groups: Iterable[Facts]) -> list[str]:
    """Returns groups of ranks with their frames, in lines."""
    lines = []
    for group in groups:
        lines.append(f"  rank {_numbered(group.get('ranks'))}:")
        lines += [f"    {frame}" for frame in group["frames"] or ("no stack",)]
    return lines


def _time(t: float | None) -> str:
    """Returns a moment as date and time in UTC."""
    try:
        return datetime.fromtimestamp(t or 0.0, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], most: int = _MAX_TEXT) -> list[str]:
    """Returns a table in Markdown, and an empty line."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(_cell(text, most) for text in row)} |" for row in rows]
    return [*lines, ""]


def _cell(text: str, most: int) -> str:
    """Returns a text that cannot end its cell or begin markup: it may be a rank's, where the user asked for texts."""
    flat = " ".join(text.split()).replace("|", "/").replace("<", "(").replace(">", ")").replace("`", "'")
    if len(flat) > most:
        return f"{flat[:most]}..."
    return flat
