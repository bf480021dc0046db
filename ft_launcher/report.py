"""The block people see on the console at a fault: at most ten lines. Pure text; decides nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from ft_launcher.attribution import Fault
from ft_launcher.restart_policy import Action, Decision

_BOLD_RED, _BOLD_GREEN, _RESET = "\033[1;31m", "\033[1;32m", "\033[0m"
_MAX_LINES = 10


def block(fault: Fault, decision: Decision, cycle: int, node: str, record: Path | None, colour: bool = False) -> str:
    """What happened, where, the likely cause, what is done next, and where the full record is.

    Args:
        record: the folder of the run; None when nothing is kept.
        colour: with ANSI colours, for a terminal.

    Returns:
        At most ten lines.
    """
    head = f"ft_launcher: rank {fault.rank} on {node} {fault.what}"
    tail = [next_step(decision)]
    if record is not None:
        tail.append(f"record: {record}")
    place = f", {fault.where}" if fault.where else ""
    lines = [f"cycle {cycle}, pid {fault.pid}{place}; class: {fault.fault_class.value}"]
    if fault.hint:
        lines.append(f"likely: {fault.hint}")
    room = _MAX_LINES - 1 - len(lines) - len(tail)
    lines += [f"| {line}" for line in fault.detail[:room]]
    room = _MAX_LINES - 1 - len(lines) - len(tail)
    lines += [f"also: {line}" for line in fault.others[: max(0, min(room, 2))]]
    if colour:
        head = f"{_BOLD_RED}{head}{_RESET}"
        if decision.action is Action.RESTART:
            tail[0] = f"{_BOLD_GREEN}{tail[0]}{_RESET}"
    return "\n".join([head, *(f"  {line}" for line in (*lines, *tail))])


def next_step(decision: Decision) -> str:
    """What is done next, and why, in one line."""
    step = f"next: {decision.action.value} - {decision.reason}"
    if decision.action is Action.RESTART:
        step += f", {decision.restarts_left} left"
    if decision.wait_s:
        step += f", after a wait of {decision.wait_s:g} s"
    return step if decision.exit_code is None else f"{step}; exit code {decision.exit_code}"


def of_rung_one(restarts_in_process: int, started_again: int, taken_over: int) -> str:
    """What rung 1 did in a run, in one line."""
    return (
        f"restarts in process: {restarts_in_process}; ranks started again alone: {started_again}; "
        f"cycles that had to end all the same: {taken_over}"
    )


def show(text: str, stream: TextIO | None = None) -> None:
    """Writes `text` to the console; a console that is gone or full ends nothing."""
    stream = stream or sys.stderr
    try:
        stream.write(text + "\n")
        stream.flush()
    except (OSError, ValueError):
        pass
