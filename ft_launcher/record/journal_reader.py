"""Reads the journals of several nodes, attempts and pieces as one sequence of events.

Used by `ft_launcher report`, `replay` and `bundle`, and for the save interval. `read_journals` yields the events of all
journals by their time; `read_in_turn` yields one journal after the other, which is faster. `parse` and `merge` do the
same for lines and events in memory, and open no file.

Everything streams: memory holds one line of each file. Anyone may have written a journal, and a launcher may have been
killed while it wrote: a journal may end in half a line, come from a later release, or lack a piece. What cannot be read
is left out and counted in `Problems`.

    problems = Problems()
    for entry in read_journals([Path("logs")], problems):
        print(entry.node, entry.t, entry.event, entry.facts.get("rank"))
    print(*problems.warnings(), sep="\\n")
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ft_launcher.record.events import EVENTS, JobStartEvent, JournalPieceEvent
from rank_monitor.contract.wire.foreign import open_regular, parse_json

_MAX_LINE = 16 << 20
"""Bytes of a line. A report of a rank has at most 64 KiB; the longest line has the stacks of all ranks of a node."""
_BUFFER = 1 << 16
"""Bytes of one read. Python's own 8 KiB would hold two or three lines."""
_MAX_NAME, _MAX_UNKNOWN = 100, 1000
"""Characters of an event's name, and how many unknown names are remembered. The file may contain anything."""
# `journal.NODE.1.jsonl` and `.2` come before `journal.NODE.jsonl`.
_PIECE = re.compile(r"(?P<node>.+?)(?:\.(?P<number>[12]))?\.jsonl")
_HEAD = re.compile(rb'\{"v": \d+, "t": [^,]*, "event": "(\w+)", ')
_LEDGER = re.compile(
    rb'\{"v": 1, "t": [^,]*, "event": "ledger", "cycle": ([^,]*), "has_ended": (?:true|false), "since": ([^,]*), '
)
"""The begin of a line `ledger` as the launcher writes it: its cycle, and since when. Lines of one part have the
same."""
_LEDGER_END = re.compile(rb', "goodput_saved": [\d.]+\}\n')
_END_BYTES = 32
"""The last bytes of a line, in which `_LEDGER_END` is searched. A line that was cut off has no such end."""


@dataclass(frozen=True)
class JournalEntry:
    """One event of a journal.

    Attributes:
        event: the name of the event. Events that this release does not know are yielded too.
        v: the version of the event.
        t: when it was written (seconds since 1970, by its node's clock).
        facts: the other keys of the line.
        run_id: the id of the job; empty where the journal has not said it before this event.
        node: the host name of the node; empty in the same case.
        attempt: the number of the launch of this job in this journal, from 1; 0 before the first launch.
        source: the path of the last file of the journal.
        line: the number of the line in the journal, all pieces together, from 1.
    """

    event: str
    v: int
    t: float
    facts: Mapping[str, Any]
    run_id: str = ""
    node: str = ""
    attempt: int = 0
    source: str = ""
    line: int = 0


@dataclass
class Problems:
    """What was wrong with the journals that were read.

    Attributes:
        cut: lines at the end of a file that are cut off.
        not_events: other lines that are no events: no JSON, or longer than 16 MiB.
        unknown: names of events that this release does not know -> how many there were.
        newer: names of events of a later version than this release knows -> that version.
        unreadable: files that could not be read to their end -> the error.
    """

    cut: int = 0
    not_events: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    newer: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)

    def warnings(self) -> list[str]:
        """Returns one line for each kind of problem that a user should know.

        Unknown events alone are no problem: every release may add some.
        """
        lines = [f"{file} cannot be read: {error}" for file, error in self.unreadable.items()]
        if self.newer:
            named = ", ".join(
                f"{name} (version {v}, known: {EVENTS[name].v})" for name, v in sorted(self.newer.items())
            )
            lines.append(f"written by a later release, and read as far as this one knows it: {named}")
        if self.not_events:
            lines.append(_left_out(self.not_events))
        return lines


def parse(lines: Iterable[bytes], findings: Problems, source: str = "") -> Iterator[JournalEntry]:
    """Yields the events of one journal.

    Args:
        lines: the lines of all its pieces in order, with their line ends. A line without an end is the end of a file.
        findings: counts what cannot be read.
        source: the name of the journal, for the entries.
    """
    position = _Position()
    for number, line in enumerate(lines, 1):
        facts = _facts(line)
        if facts is None:
            if line.endswith(b"\n"):
                findings.not_events += 1
            else:
                findings.cut += 1
            continue
        event, v, t = facts.pop("event"), facts.pop("v"), facts.pop("t")
        known = EVENTS.get(event)
        if known is None:
            if event in findings.unknown or len(findings.unknown) < _MAX_UNKNOWN:
                findings.unknown[event] += 1
        elif v > known.v:
            findings.newer[event] = max(v, findings.newer.get(event, 0))
        position.update(event, t, facts)
        yield JournalEntry(event, v, t, facts, position.run_id, position.node, position.attempt, source, number)


def merge(journals: Iterable[Iterator[JournalEntry]], run_id: str | None = None) -> Iterator[JournalEntry]:
    """Yields the events of several journals by their time. Events of one journal keep their order, even where a clock
    was set back.

    Args:
        run_id: yields only events of this job; None: of all jobs.
    """
    for entry in heapq.merge(*journals, key=lambda entry: entry.t):
        if run_id is None or entry.run_id == run_id:
            yield entry


def read_journals(paths: Iterable[Path], findings: Problems, run_id: str | None = None) -> Iterator[JournalEntry]:
    """Yields the events of all journals in files and folders by their time. Holds a descriptor for each journal.

    Args:
        paths: files, and folders that are searched for `journal.*.jsonl` at any depth.
        findings: gets what is wrong, also files that cannot be opened.
        run_id: of one job; None: the events of all jobs.
    """
    return merge([read_journal(pieces, findings) for pieces in journals_in(paths)], run_id)


def read_in_turn(
    paths: Iterable[Path], findings: Problems, run_id: str | None = None, unread: Collection[str] = ()
) -> Iterator[JournalEntry]:
    """Yields all events of one journal, then those of the next. Opens one file at a time.

    What a caller keeps of one journal then lies together in memory: a report on 256 nodes takes two thirds of the time.
    An event `ledger` that the next line replaces is left out. `line` does not count what is left out.

    Args:
        paths, findings, run_id: as for `read_journals`.
        unread: names of events to leave out, without parsing their lines.
    """
    for pieces in journals_in(paths):
        lines = _needed(_lines(pieces, findings), {name.encode() for name in unread})
        for entry in parse(lines, findings, str(pieces[-1])):
            if run_id is None or entry.run_id == run_id:
                yield entry


def read_journal(pieces: Sequence[Path], findings: Problems) -> Iterator[JournalEntry]:
    """Yields the events of one journal, with the name of its last file as their source.

    Args:
        pieces: its files, as `journals_in` returns them.
        findings: gets what is wrong, also files that cannot be opened.
    """
    return parse(_lines(pieces, findings), findings, str(pieces[-1]))


def journals_in(paths: Iterable[Path]) -> list[list[Path]]:
    """Returns the files of each journal, the earliest piece first: `NAME.1.jsonl`, `NAME.2.jsonl`, `NAME.jsonl`."""
    journals: dict[tuple[Path, str], dict[int, Path]] = {}
    for path in paths:
        if path.is_dir():
            files = sorted(path.rglob("journal.*.jsonl"))
        else:
            files = [path]
        for file in files:
            found = _PIECE.fullmatch(file.name)
            if found is None:
                name, number = file.name, "0"
            else:
                name, number = found["node"], found["number"] or "3"
            journals.setdefault((file.parent.resolve(), name), {})[int(number)] = file
    return [[pieces[number] for number in sorted(pieces)] for pieces in journals.values()]


class _Position:
    """The position in a journal: of which job, node and attempt the next lines are."""

    def __init__(self) -> None:
        self.run_id = ""
        self.node = ""
        self.attempt = 0
        self._attempts: Counter[str] = Counter()
        self._began = float("-inf")

    def update(self, event: str, t: float, facts: Mapping[str, Any]) -> None:
        """Notes an event. `job_start` and `journal_piece` say whose the following lines are; other events say
        nothing."""
        if event == JobStartEvent.event:
            self._begin(facts, t)
        elif event == JournalPieceEvent.event:
            started = facts.get("started")
            # A later `started` than the last begin shows an attempt whose `job_start` is lost. The comparison is safe,
            # since `started` is taken a moment before `job_start` is written.
            if not isinstance(started, (int, float)) or started > self._began:
                self._begin(facts, t)

    def _begin(self, facts: Mapping[str, Any], t: float) -> None:
        self.run_id = str(facts.get("run_id", ""))
        self.node = str(facts.get("node", ""))
        self._attempts[self.run_id] += 1
        self.attempt = self._attempts[self.run_id]
        self._began = t


def _left_out(lines: int) -> str:
    if lines == 1:
        return "1 line is no event and is left out"
    return f"{lines} lines are no events and are left out"


def _facts(line: bytes) -> dict[str, Any] | None:
    """Returns the object in a line; None: the line is no event."""
    try:
        facts = parse_json(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict):
        return None
    v, t, event = facts.get("v"), facts.get("t"), facts.get("event")
    # `type`: true and false are numbers, too.
    if type(v) is not int or type(t) not in (int, float) or not isinstance(event, str) or len(event) > _MAX_NAME:
        return None
    return facts


def _lines(pieces: Sequence[Path], findings: Problems) -> Iterator[bytes]:
    for piece in pieces:
        try:
            with open_regular(piece, follow_link=True, buffering=_BUFFER) as file:
                yield from _lines_of(file)
        except OSError as error:
            findings.unreadable[str(piece)] = error.strerror or str(error)


def _needed(lines: Iterable[bytes], unread: Collection[bytes]) -> Iterator[bytes]:
    """Yields lines without those of events in `unread`, and without each `ledger` that the next line replaces.

    While a cycle runs, `ledger` is written every ten minutes, and only the last line of a part counts. These lines are
    most bytes of a journal of a month, so they are recognized by their text and not parsed. A line that does not look
    exactly as the launcher writes it is left to `parse`.
    """
    held = b""
    held_part = None
    for line in lines:
        part = None
        found = _LEDGER.match(line)
        if found is not None and _LEDGER_END.search(line, len(line) - _END_BYTES):
            part = found.groups()
        else:
            head = _HEAD.match(line)
            if head is not None and head[1] in unread:
                continue
        if held_part is not None and held_part != part:
            yield held
        if part is None:
            yield line
        held = line
        held_part = part
    if held_part is not None:
        yield held


def _lines_of(file: IO[bytes]) -> Iterator[bytes]:
    """Yields each line of a file; an empty line in the place of a line that is longer than `_MAX_LINE`."""
    in_long = False
    while line := file.readline(_MAX_LINE):
        whole = len(line) < _MAX_LINE or line.endswith(b"\n")
        if whole and in_long:
            yield b"\n"
        elif whole:
            yield line
        in_long = not whole
