"""What people see on the console at a fault: the block of at most ten lines, and what torch's summary adds to it.

Pure text; decides nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ft_launcher.attribution import Fault, FaultClass, FaultKind
from ft_launcher.restart_policy import Action, Decision

_BOLD_RED, _BOLD_GREEN, _RESET = "\033[1;31m", "\033[1;32m", "\033[0m"
_MAX_LINES = 10
_OTHERS = 2
"""Lines about other ranks. At a hang there is room for them: where those are that did not fail says most."""


def block(fault: Fault, decision: Decision, cycle: int, node: str, record: Path | None, colour: bool = False) -> str:
    """What happened, where, the likely cause, what is done next, and where the full record is.

    Args:
        record: the folder of the run; None when nothing is kept.
        colour: with ANSI colours, for a terminal.

    Returns:
        At most ten lines.
    """
    head = f"ft_launcher: {headline(fault, node)}"
    tail = [next_step(decision)]
    if record is not None:
        tail.append(f"record: {record}")
    place = f", {fault.where}" if fault.where else ""
    lines = [f"cycle {cycle}, pid {fault.pid}{place}; class: {fault.fault_class.value}"]
    if fault.hint:
        lines.append(f"likely: {fault.hint}")
    room = _MAX_LINES - 1 - len(lines) - len(tail)
    kept_free = min(_OTHERS, len(fault.others)) if fault.fault_class is FaultClass.HANG else 0
    lines += [f"| {line}" for line in fault.detail[: room - kept_free]]
    room = _MAX_LINES - 1 - len(lines) - len(tail)
    lines += [f"also: {line}" for line in fault.others[: max(0, min(room, _OTHERS))]]
    head, lines, tail = printable(head), list(map(printable, lines)), list(map(printable, tail))
    if colour:
        head = f"{_BOLD_RED}{head}{_RESET}"
        if decision.action is Action.RESTART:
            tail[0] = f"{_BOLD_GREEN}{tail[0]}{_RESET}"
    return "\n".join([head, *(f"  {line}" for line in (*lines, *tail))])


def headline(fault: Fault, node: str) -> str:
    """Who failed, and how, in one line."""
    return f"rank {fault.rank} on {node} {fault.what}"


def failed_ranks(name: str, failures: Mapping[int, Any], fault: Fault | None, hidden: Collection[int]) -> str:
    """What torch's summary of failed ranks adds to the block: one line each, with times and error files.

    Args:
        name: of what the ranks ran.
        failures: torch's `ProcessFailure` by global rank; those that failed by themselves.
        fault: the one whose block was printed; None: none was, since the first failure is another node's.
        hidden: ranks whose traceback did not go to the console.
    """
    lines = [f"{name} FAILED"]
    first = failures.get(fault.rank) if fault is not None else None
    if fault is not None and first is not None:
        hung = fault.kind is FaultKind.HANG
        lines += ["Root Cause (first observed failure):", *_failed(fault.rank, first, hung, fault.rank in hidden)]
    others = {rank: failure for rank, failure in failures.items() if failure is not first}
    if others:
        lines.append("Other failures:" if first is not None else "Failures on this node, after that of another:")
    for rank, failure in others.items():
        lines += _failed(rank, failure, False, rank in hidden)
    return "\n".join(lines)


def _failed(rank: int, failure: Any, ended_by_us: bool, hidden: bool) -> Iterator[str]:
    number = f" ({failure.signal_name()})" if failure.exitcode < 0 else ""
    end = "ended by the launcher" if ended_by_us else f"exitcode: {failure.exitcode}{number}"
    file = f"error_file: {failure.error_file}"
    yield (
        f"  rank: {rank} (local_rank: {failure.local_rank}), {end} (pid: {failure.pid}), "
        f"time: {failure.timestamp_isoformat()}, {file}"
    )
    if hidden and isinstance(failure.message, dict):
        text = str(failure.message.get("extraInfo", {}).get("py_callstack", failure.message.get("message", "")))
        yield from (f"    {line}" for line in text.splitlines())


def next_step(decision: Decision) -> str:
    """What is done next, and why, in one line."""
    step = f"next: {decision.action.value} - {decision.reason}"
    if decision.action is Action.RESTART:
        step += f", {decision.restarts_left} left"
    if decision.wait_s:
        step += f", after a wait of {decision.wait_s:g} s"
    return step if decision.exit_code is None else f"{step}; exit code {decision.exit_code}"


def of_interruption(record: Mapping[str, Any]) -> str:
    """What a rank wrote of a fault in process, in a few words."""
    consequence = " in consequence" if record.get("collateral") else ""
    return f"rank {record.get('rank')}: {record.get('interruption')}{consequence}"


def of_rung_one(restarts_in_process: int, started_again: int, taken_over: int) -> str:
    """What rung 1 did in a run, in one line."""
    return (
        f"restarts in process: {restarts_in_process}; ranks started again alone: {started_again}; "
        f"cycles that had to end all the same: {taken_over}"
    )


def printable(text: str, keep: str = "\t") -> str:
    """`text` with every control character as its escape: what a rank chose must not move a terminal's cursor, nor
    look like a line of the launcher.

    Args:
        keep: characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode()
        for letter in text
    )


class LineFormatter(logging.Formatter):
    """Log lines of the launcher: each message is one printable line; a traceback below it keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """As the parent's, of the escaped message."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """As the parent's, escaped."""
        return printable(super().formatException(ei), "\t\n")


def show(text: str) -> None:
    """Writes one line to the console, escaped; a console that is gone or full ends nothing."""
    show_lines(printable(text), escape=False)


def show_lines(text: str, escape: bool = True) -> None:
    """Writes lines to the console; as `show`.

    Args:
        escape: False: `text` is printable but for colours.
    """
    try:
        sys.stderr.write((printable(text, "\t\n") if escape else text) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # no standard error at all: it is None
        pass
