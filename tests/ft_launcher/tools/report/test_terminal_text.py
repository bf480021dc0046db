"""The report in words."""

from __future__ import annotations

import re

from ft_launcher.tools.report import terminal_text
from ft_launcher.tools.report.advice import advise
from tests.ft_launcher.tools.report.lines import (
    NODE_A,
    NODE_B,
    begins,
    durations,
    end,
    fault,
    found,
    limits,
    part,
    start,
    steps,
    verdict,
)

MOMENT = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def test_two_attempts_of_two_nodes() -> None:
    findings = found(NODE_A, NODE_B)
    lines = terminal_text.as_lines(findings, advise(findings))
    assert lines[0] == (
        "Ran 2 min 11 s on 2 nodes in 2 attempts; 19.1% of the time were steps that count, 11.5% until the last "
        "checkpoint. 2 faults cost 53.2 s (signal 1, hang 1). It succeeded."
    )
    assert lines[1:3] == ["", "Advice"]
    assert any(line.startswith("  largest loss (up to ") for line in lines)
    text = "\n".join(lines)
    assert "  reschedule                       40.0 s   30.5%" in text
    assert any(
        re.fullmatch(rf"  {MOMENT} signal of rank 3 on b, cycle 0, attempt 1 \(memory\)", line) for line in lines
    )
    assert "    13.2 s, 0.0147 rank-hours: detection 1.2 s, stop 2.0 s, rendezvous 500 ms, start 3.0 s" in text
    assert "lost progress 5.0 s" in text
    assert "  checkpoint interval: 2 faults are too few to say how often to save" in text


def test_a_fault_has_its_moment_its_stack_and_the_collectives_of_the_others() -> None:
    """In a journal from elsewhere these may be anything."""
    others = ["ranks 0,2: in all_reduce 4 of group dp, at train.py:40 in step (iteration 3)", 5, *["x" * 9999] * 99]
    hang = fault(5, 0, kind="hang", what="hangs: ...", detail=["train.py:28 in load"], others=others)
    strange = fault(-1e11, 1, detail="no list", others={"no": "list"})
    lines = terminal_text.as_lines(found([start(0), begins(1, 0), hang, strange, part(0, 0, 10), end(11)]), ())
    place = next(number for number, line in enumerate(lines) if re.match(rf"  {MOMENT} hang of rank 1", line))
    assert lines[place + 2 : place + 5] == ["    hangs: ...", "    | train.py:28 in load", f"    also: {others[0]}"]
    assert sum("also: x" in line for line in lines) == 8 and max(map(len, lines)) < 600


def test_a_fault_of_which_nothing_is_known() -> None:
    known = {"rank": None, "kind": None, "what": None, "fault_class": None}
    text = "\n".join(terminal_text.as_lines(found([start(0), begins(1, 0), fault(5, 0) | known, end(9)]), ()))
    assert re.search(rf"\n  {MOMENT} a fault of unknown kind on a, cycle 0, attempt 1 \(unknown\)\n", text)
    assert "None" not in text


def test_a_healthy_job() -> None:
    findings = found([start(0), begins(1, 0), steps(0, 0, 20, 0, 9), part(None, 20, 21), end(21)])
    text = "\n".join(terminal_text.as_lines(findings, ()))
    assert text.startswith("Ran 21.0 s on 1 node in 1 attempt; 47.6% ")
    assert "No fault is known. It succeeded." in text
    assert "Costliest" not in text and "Advice" not in text


def test_how_it_ended() -> None:
    assert terminal_text.verdict(found([start(0), end(3, 85)])).endswith("It ended with exit code 85: why.")
    silent = [start(0), {**end(3, 85), "reason": None}]
    assert terminal_text.verdict(found(silent)).endswith("It ended with exit code 85.")
    finished = [start(0), {**end(3, 85), "reason": "the store is lost."}]
    assert terminal_text.verdict(found(finished)).endswith("It ended with exit code 85: the store is lost.")
    assert terminal_text.verdict(found([start(0)])).endswith("its launcher was killed.")


def test_sections_beside_their_limits() -> None:
    seen = {"step": durations(41000, 2.4), "save": durations(31, 40.0)}
    learned = limits(2, ["section:step"], step=60.0)
    lines = [start(0), begins(1, 0), learned, verdict(3, 0, "section:step"), part(0, 0, 10, durations=seen), end(11)]
    shown = terminal_text.as_lines(found(lines), ())
    place = shown.index("Sections and their limits (of one rank of each node)")
    assert shown[place + 1 : place + 3] == [
        "  step: 41,000 times, 99.9% at most 1.0 s, longest 2.4 s, limit 1 min (learned), fired in 1 cycle, long",
        "  save: 31 times, longest 40.0 s, limit none",
    ]
