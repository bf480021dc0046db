"""Journals are read whatever their last writer, their release and their disk did to them."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_launcher.record import events
from ft_launcher.record.events import Event
from ft_launcher.record.journal.journal import Journal, as_line
from ft_launcher.record.journal_reader import (
    JournalEntry,
    Problems,
    journals_in,
    merge,
    parse,
    read_in_turn,
    read_journals,
)
from ft_launcher.record.ledger.account import Account, CycleTimes, part_as_json


def line(event: str, t: float, v: int = 1, **facts: Any) -> bytes:
    return json.dumps({"v": v, "t": t, "event": event, **facts}).encode() + b"\n"


def start(t: float, run_id: str = "run", node: str = "a") -> bytes:
    return line("job_start", t, run_id=run_id, node=node)


def piece(t: float, started: float, run_id: str = "run", node: str = "a") -> bytes:
    return line("journal_piece", t, run_id=run_id, node=node, started=started, piece=2, lost_bytes=0)


def names(found: list[JournalEntry]) -> list[str]:
    return [entry.event for entry in found]


def test_an_event_is_read_with_its_job_its_node_and_its_attempt() -> None:
    rows = [start(1.5), line("rank_exit", 2, cycle=0, rank=3, exit_code=-11)]
    (_, found) = parse(rows, Problems(), "journal.a.jsonl")
    facts = {"cycle": 0, "rank": 3, "exit_code": -11}
    assert found == JournalEntry("rank_exit", 1, 2, facts, "run", "a", 1, "journal.a.jsonl", 2)


SIGNAL = line("signal", 2)


@pytest.mark.parametrize(
    ("rows", "read", "cut", "not_events"),
    [
        ([start(1), SIGNAL[:-5]], ["job_start"], 1, 0),
        ([start(1), SIGNAL[:-1]], ["job_start", "signal"], 0, 0),
        ([start(1), b'{"v": 1, "t"\n', SIGNAL], ["job_start", "signal"], 0, 1),
        ([b"\x00" * 100 + b"\n", SIGNAL], ["signal"], 0, 1),
        ([b"\n", SIGNAL], ["signal"], 0, 1),
        ([b"[1, 2]\n", b'"text"\n', b"17\n", SIGNAL], ["signal"], 0, 3),
        ([b'{"v": 1, "t": 1.0}\n', b'{"event": "signal"}\n'], [], 0, 2),
        ([line("signal", 1, v=True), line("signal", True)], [], 0, 2),
        ([b'{"v": 1, "t": "now", "event": "signal"}\n'], [], 0, 1),
        ([b'{"v": 1, "t": 1, "event": ["signal"]}\n'], [], 0, 1),
        ([b'{"v": 1, "t": 1, "event": "' + b"x" * 101 + b'"}\n'], [], 0, 1),
        ([b'{"v": 1, "t": 1, "event": "signal", "deep": ' + b"[" * 99_999 + b"\n", SIGNAL], ["signal"], 0, 1),
        ([b'{"v": 1, "t": NaN, "event": "signal"}\n', SIGNAL], ["signal"], 0, 1),
        ([b"\xff\xfe\n", SIGNAL], ["signal"], 0, 1),
        ([], [], 0, 0),
    ],
)
def test_what_is_no_event_is_left_out_and_counted(
    rows: list[bytes], read: list[str], cut: int, not_events: int
) -> None:
    findings = Problems()
    assert names(list(parse(rows, findings))) == read
    assert (findings.cut, findings.not_events) == (cut, not_events)
    assert bool(findings.warnings()) is bool(not_events), "half a line at the end is how a killed launcher leaves it"


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
OF_A_HEAD = st.sampled_from(["job_start", "journal_piece", "signal", "other"])


@settings(deadline=None)
@given(
    st.lists(
        st.binary(max_size=30)
        | st.dictionaries(st.sampled_from(["v", "t", "event", "run_id", "node", "started"]), VALUES | OF_A_HEAD).map(
            lambda facts: json.dumps({"v": 1, "t": 1.0, "event": "signal"} | facts).encode() + b"\n"
        )
    )
)
def test_no_bytes_end_the_reader(rows: list[bytes]) -> None:
    findings = Problems()
    found = list(merge([parse(rows, findings), parse(reversed(rows), findings)]))
    assert len(found) + findings.not_events + findings.cut == 2 * len(rows)
    assert all(isinstance(text, str) for text in findings.warnings())


def test_an_unknown_event_is_passed_on_without_a_warning() -> None:
    findings = Problems()
    (found,) = parse([line("of_next_year", 1, key="value")], findings)
    assert (found.event, found.facts) == ("of_next_year", {"key": "value"})
    assert findings.unknown == {"of_next_year": 1} and findings.warnings() == []


def test_unknown_names_are_remembered_up_to_a_bound() -> None:
    findings = Problems()
    assert len(list(parse((line(f"event{number}", 1) for number in range(3000)), findings))) == 3000
    assert len(findings.unknown) == 1000


def test_a_newer_version_is_one_warning_and_read_as_far_as_known() -> None:
    findings = Problems()
    rows = [line("signal", 1, v=2, signal=15, colour="red"), line("signal", 2, v=3), line("fault", 3, v=2)]
    assert [entry.facts.get("colour") for entry in parse(rows, findings)] == ["red", None, None]
    (warning,) = findings.warnings()
    assert "fault (version 2, known: 1), signal (version 3, known: 1)" in warning


@pytest.mark.parametrize(
    ("rows", "attempts"),
    [
        ([SIGNAL, start(1), SIGNAL], [("", 0), ("run", 1), ("run", 1)]),
        ([start(1), start(2), SIGNAL], [("run", 1), ("run", 2), ("run", 2)]),
        ([start(1), start(2, "other"), start(3)], [("run", 1), ("other", 1), ("run", 2)]),
        ([start(1), piece(2, started=0.9), SIGNAL], [("run", 1)] * 3),
        ([start(1), piece(9, started=5), SIGNAL], [("run", 1), ("run", 2), ("run", 2)]),
        ([start(1), piece(9, started=5), piece(12, started=5)], [("run", 1), ("run", 2), ("run", 2)]),
        ([piece(9, started=5), start(12)], [("run", 1), ("run", 2)]),
        ([line("journal_piece", 9), SIGNAL], [("", 1), ("", 1)]),
    ],
    ids=[
        *("before the start", "two attempts", "two jobs", "a piece of the attempt", "of one whose start is lost"),
        *("two of it", "the first piece is lost", "without its keys"),
    ],
)
def test_attempts_are_counted_for_each_job(rows: list[bytes], attempts: list[tuple[str, int]]) -> None:
    assert [(entry.run_id, entry.attempt) for entry in parse(rows, Problems())] == attempts


def test_nodes_are_merged_by_time_and_jobs_are_told_apart() -> None:
    a = [start(1), line("signal", 4), line("job_end", 6)]
    b = [start(2, node="b"), line("signal", 3), start(5, "other", "b")]

    def journals() -> list[Any]:
        return [parse(rows, Problems()) for rows in (a, b)]

    assert [(entry.t, entry.node) for entry in merge(journals())] == [*zip(range(1, 7), "abbaba", strict=True)]
    assert [entry.t for entry in merge(journals(), "run")] == [1, 2, 3, 4, 6]
    assert [entry.t for entry in merge(journals(), "other")] == [5]


def test_a_clock_that_was_set_back_does_not_change_the_order_of_its_journal() -> None:
    a = [start(100), line("signal", 50), line("job_end", 101)]
    b = [line("fault", 99), line("fault", 100.5)]
    found = names(list(merge([parse(rows, Problems()) for rows in (a, b)])))
    assert [name for name in found if name != "fault"] == ["job_start", "signal", "job_end"]


def test_pieces_come_in_their_order_and_other_files_are_left_alone(tmp_path: Path) -> None:
    folders = [tmp_path / "run", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
        for name in ("a.jsonl", "a.2.jsonl", "a.1.jsonl", "a_2.jsonl", "b.lan.jsonl", "a.new"):
            (folder / f"journal.{name}").write_bytes(b"")
        (folder / "history.jsonl").write_bytes(b"")
    found = [[file.name for file in pieces] for pieces in journals_in([tmp_path])]
    of_a = ["journal.a.1.jsonl", "journal.a.2.jsonl", "journal.a.jsonl"]
    assert sorted(found) == sorted([of_a, ["journal.a_2.jsonl"], ["journal.b.lan.jsonl"]] * 2)
    assert journals_in([folders[0], folders[0] / "journal.a.jsonl"]) == journals_in([folders[0]])
    assert journals_in([folders[0] / "journal.a.jsonl"]) == [[folders[0] / "journal.a.jsonl"]]


def ledger(until: float, has_ended: bool = False, since: float = 1.5, cycle: int = 3) -> Event:
    part = CycleTimes(cycle, since, until, {"step": until})
    return events.LedgerEvent(has_ended=has_ended, **part_as_json(part, Account({}, until, 0.9, 0.0, 7)))


def test_in_turn_a_ledger_that_the_next_line_replaces_is_left_out(tmp_path: Path) -> None:
    written = [
        *(events.JobStartEvent("run", "a", [], 1, 2, {}), ledger(2), ledger(3), ledger(4)),
        *(events.RankExitEvent(3, 1, 0), ledger(5), ledger(6, has_ended=True)),
        *(ledger(8, since=6.0, cycle=4), ledger(9, since=6.0, cycle=4)),
    ]
    journal_of(tmp_path, "a", written)
    findings = Problems()
    found = [entry.facts.get("until", entry.event) for entry in read_in_turn([tmp_path], findings)]
    assert found == ["job_start", 4, "rank_exit", 6, 9]
    assert findings == Problems()


def test_in_turn_half_a_ledger_replaces_none(tmp_path: Path) -> None:
    """The disk was full, or the launcher was killed."""
    for number, (half, end) in enumerate([(0.4, "\n"), (0.8, "\n"), (0.97, "\n"), (0.97, "")]):
        whole, cut = (as_line(ledger(until), until) for until in (2, 3))
        path = tmp_path / f"journal.{number}.jsonl"
        path.write_text(f"{whole}\n{cut[: int(len(cut) * half)]}{end}")
        findings = Problems()
        assert [entry.facts["until"] for entry in read_in_turn([path], findings)] == [2]
        assert findings.cut + findings.not_events == 1


def test_in_turn_some_events_can_be_left_out(tmp_path: Path) -> None:
    journal_of(
        tmp_path,
        "a",
        [events.RankExitEvent(0, 1, 3), events.SignalEvent(2), ledger(2), events.SignalEvent(15), ledger(3)],
    )
    found = list(read_in_turn([tmp_path], Problems(), unread=["signal"]))
    assert [(entry.event, entry.facts.get("until")) for entry in found] == [("rank_exit", None), ("ledger", 3)]


def test_files_that_cannot_be_read_cost_only_their_own_events(tmp_path: Path) -> None:
    (tmp_path / "journal.a.jsonl").write_bytes(start(1))
    (tmp_path / "journal.b.jsonl").mkdir()
    findings = Problems()
    found = read_journals([*tmp_path.glob("*.jsonl"), tmp_path / "journal.c.jsonl"], findings)
    assert names(list(found)) == ["job_start"]
    assert list(findings.unreadable) == [str(tmp_path / "journal.c.jsonl")]


def test_journals_are_read_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "journal.a.jsonl").write_bytes(start(1) + line("job_end", 5))
    (tmp_path / "journal.b.jsonl").write_bytes(start(2, run_id="other") + line("job_end", 3))
    (tmp_path / "journal.c.jsonl").write_bytes(start(3))
    assert [entry.t for entry in read_in_turn([tmp_path], Problems())] == [1, 5, 2, 3, 3]
    assert [entry.t for entry in read_in_turn([tmp_path], Problems(), "run")] == [1, 5, 3]
    assert [entry.t for entry in read_journals([tmp_path], Problems(), "run")] == [1, 3, 5]


def test_a_line_without_an_end_fills_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "journal.a.jsonl"
    with path.open("wb") as file:
        for _ in range(128):
            file.write(b"x" * (1 << 20))
        file.write(b"\n" + start(1))
    findings = Problems()
    tracemalloc.start()
    try:
        assert names(list(read_journals([path], findings))) == ["job_start"]
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert findings.not_events == 1


def journal_of(folder: Path, node: str, written: list[Event], max_mb: float | None = None) -> None:
    journal = Journal(max_mb)
    journal.run_id, journal.node = "run", node
    journal.open(folder / f"journal.{node}.jsonl")
    for event in written:
        journal.write(event)
    journal.close()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written: list[Event] = [
        events.JobStartEvent("run", "a", ["ft_launcher"], 1, 2, {}),
        events.RankExitEvent(0, 1, 3),
        events.CycleEndEvent(0, "failed", iteration=None, lived_s=1.5),
    ]
    journal_of(tmp_path, "a", written)
    findings = Problems()
    found = list(read_journals([tmp_path], findings))
    assert [(entry.event, entry.facts) for entry in found] == [(event.event, event.facts()) for event in written]
    assert findings == Problems()


def test_a_rotated_journal_of_two_attempts_is_read_with_its_gap(tmp_path: Path) -> None:
    for node in ("a", "b"):
        for attempt in range(2):
            exits = [events.RankExitEvent(attempt, rank, 1) for rank in range(60)]
            journal_of(tmp_path, node, [events.JobStartEvent("run", node, [], 1, 2, {}), *exits], max_mb=0.002)
    findings = Problems()
    found = list(read_journals([tmp_path], findings, "run"))
    assert findings == Problems()
    # The first line of a piece is made when the next one is there already.
    times = [entry.t for entry in found if entry.event != "journal_piece"]
    assert times == sorted(times)
    for node in ("a", "b"):
        ends = [entry for entry in found if entry.node == node and entry.event == "rank_exit"]
        places = [(entry.facts["cycle"], entry.facts["rank"]) for entry in ends]
        assert places[0] == (0, 0) and places[-1] == (1, 59) and len(places) < 120
        assert [entry.attempt for entry in ends] == [cycle + 1 for cycle, _ in places]
