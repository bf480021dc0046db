"""The journals of the benchmark P14b are what launchers write, and a report finds in them what was put in."""

from __future__ import annotations

import collections.abc
import json
import typing
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any

import pytest

from ft_launcher.record.events import EVENTS, Absent
from scripts.bench import long_journals
from tests.ft_launcher.conftest import main

NODES, CYCLES = 3, 4
FAULTS = CYCLES - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("journals")
    long_journals.write(written, long_journals.Job(NODES, CYCLES, days=0.5))
    return written


def ends(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Runs a command that ends well and says nothing on stderr; returns what it prints."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    return out


def test_a_report_has_what_was_put_in(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    ends(capsys, "report", folder, "-o", file)
    found = json.loads(file.read_text())
    assert (found["node_count"], found["ranks"], found["exit_code"]) == (NODES, NODES * long_journals.RANKS, 0)
    assert [cycle["cycle"] for cycle in found["cycles"]] == list(range(CYCLES))
    assert [fault["kind"] for fault in found["faults"]] == ["hang", "exception", "signal"]
    assert found["seconds"]["step"] > 0.8 * found["wall_s"]
    assert "unknown" not in found["seconds"]


def test_the_launcher_would_decide_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ends(capsys, "replay", folder)
    assert out == f"decided as then: {FAULTS} x decision, 2 x fault, 1 x fault by the ranks of all nodes\n"


def test_the_events_have_the_fields_that_are_documented(folder: Path) -> None:
    lines = [json.loads(line) for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]
    assert {line["event"] for line in lines} >= {"limits", "ledger", "verdict", "evidence", "stacks", "decision"}
    for line in lines:
        event = EVENTS[line.pop("event")]
        assert line.pop("v") == event.v and isinstance(line.pop("t"), float)
        kinds = typing.get_type_hints(event)
        wrong = {
            field.name for field in fields(event) if not fits(line.pop(field.name, Absent.ABSENT), kinds[field.name])
        }
        assert (event.event, wrong, line) == (event.event, set(), {})


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON, or `ABSENT`, is of a type that an event declares."""
    if kind is Any:
        return value is not Absent.ABSENT
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (UnionType, typing.Union):
        return any(fits(value, part) for part in parts)
    if origin is collections.abc.Mapping:
        return isinstance(value, dict) and all(fits(one, parts[1]) for one in value.values())
    if origin in (list, collections.abc.Sequence):
        return isinstance(value, list) and all(fits(one, parts[0]) for one in value)
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind
