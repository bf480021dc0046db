"""What `ft_launcher top` shows of a status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console, Group

from ft_launcher.tools.commands import live_view
from ft_launcher.tools.status import summary
from tests.ft_launcher.tools.status.test_node_status import (
    CYCLE,
    LOADED,
    READINGS,
    SAVED,
    START,
    TIMES,
    after,
    decision,
    fault,
)


def rank(state: str = "training", iteration: int | None = 40, exit_code: int | None = None) -> dict[str, Any]:
    return {"rank": 0, "state": state, "iteration": iteration, "exit_code": exit_code, "sign_age_s": 1.0}


@pytest.mark.parametrize(
    ("others", "character", "style"),
    [
        (rank(), ".", "green"),
        (rank(iteration=39), ".", "green"),
        (rank(iteration=38), "2", "yellow"),
        (rank(iteration=31), "9", "yellow"),
        (rank(iteration=30), "+", "yellow"),
        (rank(iteration=None), ".", "green"),
        (rank("hung"), "H", "bold reverse red"),
        (rank("stalled"), "=", "yellow"),
        (rank("starting", None), "s", "blue"),
        (rank("unwatched", None), "u", "dim"),
        (rank("exited", exit_code=0), "x", "dim"),
        (rank("exited", exit_code=-9), "x", "bold red"),
    ],
)
def test_the_character_of_a_rank(others: dict[str, Any], character: str, style: str) -> None:
    text = live_view.strip([rank(), others])
    assert text.plain == f".{character}" and text.spans[-1].style == style


def test_a_status() -> None:
    status = after(START, CYCLE, fault(what="hangs \x1b[2J [bold]\u202e", cycle=0), decision(), replace(CYCLE, cycle=1))
    status.read(READINGS)
    found = summary.as_json(status.facts(), status.readings, TIMES, 102.0, 2000.0, "1.2")
    assert shown(found) == [
        "train-7: running, cycle 1, step 41, saved at step 40, goodput 90.0%, 1 fault",
        "s stacks of all ranks now, a of all nodes, Esc without them, q leaves",
        "",
        "node    ranks  most silent",
        "host-a  ..     rank 1, 14.0 s",
        ". training   2-9 + so many steps behind   = makes no steps   H hung   s starting   u not watched   x exited",
        "",
        "cycle 0: rank 1 hangs \\x1b[2J [bold]\\u202e",
        "next: restart: restart 1 of 3",
    ]
    assert shown(found, "the launcher has not answered for 4 s")[1] == "the launcher has not answered for 4 s"
    assert shown(found, stacks=["rank 0:", "  [red]main"])[7:] == ["rank 0:", "[red]main"]


def test_state_in_memory_and_what_the_fault_has_cost() -> None:
    status = after(START, CYCLE, SAVED, fault(), decision(), replace(CYCLE, cycle=1), LOADED)
    status.read(READINGS)
    found = summary.as_json(status.facts(), status.readings, TIMES, 102.0, 2000.0, "1.2")
    lines = shown(found)
    assert lines[1].startswith("in memory: step 40 (5 behind); went on from step 21, 24 steps lost; 4 saves took 0.9%")
    assert lines[-1] == "next: restart: restart 1 of 3; 24 steps lost"


def test_a_row_for_each_node_on_the_coordinator() -> None:
    status = after(START, CYCLE)
    status.read(READINGS)
    found = summary.as_json(status.facts(), status.readings, TIMES, 102.0, 2000.0, "1.2") | {"node_rank": 1}
    others = [
        {"node_rank": 2, "node": "host-c", "age_s": None, "is_old": False, "ranks": []},
        {
            "node_rank": 0,
            "node": "host-b",
            "age_s": 4.0,
            "is_old": False,
            "ranks": [rank(iteration=9), rank(iteration=6)],
        },
        {"node_rank": 3, "node": "host-d", "age_s": 61.0, "is_old": True, "ranks": [rank("hung")]},
    ]
    lines = shown(found | {"other_nodes": others})[3:8]
    assert [line.split(maxsplit=2) for line in lines[1:]] == [
        ["host-b", ".3", "rank 0, 1.0 s"],
        ["host-a", "..", "rank 1, 14.0 s"],
        ["host-c", "no", "report yet"],
        ["host-d", "H", "no report for 61 s"],
    ]


def test_more_nodes_than_lines() -> None:
    """Those that are not well stay, and so does what is below them."""
    status = after(START, CYCLE, fault(cycle=0), decision(), replace(CYCLE, cycle=1))
    status.read(READINGS)
    found = summary.as_json(status.facts(), status.readings, TIMES, 102.0, 2000.0, "1.2")
    others = [
        {"node_rank": n, "node": f"node-{n}", "age_s": 1.0, "is_old": False, "ranks": [rank()]} for n in range(1, 64)
    ]
    others[59] |= {"ranks": [rank("hung")]}
    others[61] |= {"age_s": None, "is_old": False, "ranks": []}
    found |= {"other_nodes": others}
    lines = shown(found)
    assert len(lines) <= 24 and lines[-1] == "next: restart: restart 1 of 3"
    named = [line.split()[0] for line in lines[4:] if line]
    assert "host-a" in named and "node-60" in named and "node-62" in named
    more = next(line for line in lines if line.startswith("and "))
    assert more == f"and {64 - sum(name.startswith(('host-', 'node-')) for name in named)} nodes more, all of them well"
    lines = shown(found, stacks=[f"line {n}" for n in range(9)])
    assert len(lines) <= 24 and lines[-1] == "line 8"


def test_before_the_first_rank() -> None:
    found = summary.as_json(after(START).facts(), (), None, 1.0, 2000.0, "1.2")
    lines = shown(found)
    assert lines[0] == "train-7: starting" and lines[-1] == "no fault so far; 3 of 3 restarts left"


def shown(found: dict[str, Any], note: str = "", stacks: list[str] | None = None, height: int = 24) -> list[str]:
    """The lines of the screen, faults without their time."""
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(Group(*live_view.parts(found, note, stacks or [], height)))
    lines = [line.strip() for line in captured.get().splitlines()]
    return [line[9:] if line[2:3] == ":" else line for line in lines]
