"""Console text: the block of at most ten lines at a fault, the summary of failed ranks, and single lines.

Called by `recorder.py`, by whatever prints a line of the launcher (`say`), and at the launcher's end. Formats text and
writes it to standard error, which does not block once `console.install` was called. Decides nothing. All text passes
`printable`: most of it contains words of a rank, which must not move the terminal's cursor.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ft_launcher.decide.attribution import Fault, FaultClass, FaultKind
from ft_launcher.decide.policy.restart_policy import Action, Decision
from rank_monitor.contract.console_line import console_line
from rank_monitor.contract.memory_files import StateTier

# ECMA-48 codes, as every terminal has them.
_BOLD_RED, _BOLD_GREEN, _RESET = "\033[1;31m", "\033[1;32m", "\033[0m"
_NEXT = "next: "
# Lines of the block. It must be seen at once in a log that goes on; everything else is in the record.
_MAX_LINES = 10
_INTERRUPTIONS = {
    "EXCEPTION": "raised an exception",
    "BASE_EXCEPTION": "left",
    "SOFT_TIMEOUT": "made no progress within soft_timeout",
    "HARD_TIMEOUT": "made no progress within hard_timeout",
    "TERMINATED": "ended",
    "UNRESPONSIVE": "did not come in time",
    "MONITOR_PROCESS_EXCEPTION": "has a monitor that failed",
    "JOINING": "was started again and joins",
}
"""Name of an `Interruption` (`ft_client.inprocess.attribution`), as ranks write it -> words."""
_OTHERS = 2
"""Lines about other ranks in the block. At a hang room is kept for these, since where the other ranks are explains
most."""


def block(fault: Fault, decision: Decision, cycle: int, node: str, record: Path | None, at: float) -> list[str]:
    """Returns the block about a fault: what happened, where, the likely cause, the next step, where the full record is.

    Args:
        node: the host name of the node whose rank failed.
        record: the folder of the run; None when nothing is kept.
        at: when the block is shown (seconds since 1970).

    Returns:
        At most ten printable lines, the next step among the last two.
    """
    head = console_line(headline(fault, node), at)
    tail = [next_step(decision)]
    if record is not None:
        tail.append(f"record: {record}")
    if fault.where:
        place = f", {fault.where}"
    else:
        place = ""
    lines = [f"cycle {cycle}, pid {fault.pid}{place}; class: {fault.fault_class.value}"]
    if fault.hint:
        lines.append(f"likely: {fault.hint}")
    room = _MAX_LINES - 1 - len(lines) - len(tail)
    if fault.fault_class is FaultClass.HANG:
        kept_free = min(_OTHERS, len(fault.others))
    else:
        kept_free = 0
    lines += [f"| {line}" for line in fault.detail[: room - kept_free]]
    room = _MAX_LINES - 1 - len(lines) - len(tail)
    lines += [f"also: {line}" for line in fault.others[: max(0, min(room, _OTHERS))]]
    return [printable(head), *(f"  {printable(line)}" for line in (*lines, *tail))]


def in_colour(lines: Sequence[str]) -> list[str]:
    """Returns a block with ANSI colours for a terminal: the headline red, a restart as the next step green."""
    head, *rest = lines
    restart = f"  {_NEXT}{Action.RESTART.value} "
    coloured = [f"{_BOLD_GREEN}{line}{_RESET}" if line.startswith(restart) else line for line in rest]
    return [f"{_BOLD_RED}{head}{_RESET}", *coloured]


def headline(fault: Fault, node: str) -> str:
    """Returns which rank failed, and how, in one line."""
    return f"rank {fault.rank} on {node} {fault.what}"


def failed_ranks(name: str, failures: Mapping[int, Any], fault: Fault | None, hidden: Collection[int]) -> str:
    """Returns the summary of failed ranks in torch's words: one line for each, with its time and error file.

    Args:
        name: of what the ranks ran.
        failures: torch's `ProcessFailure` by global rank; those that failed by themselves.
        fault: the one whose block was printed; None: none was, since the first failure is another node's.
        hidden: ranks whose traceback did not go to the console.
    """
    lines = [f"{name} FAILED"]
    if fault is not None:
        first = failures.get(fault.rank)
    else:
        first = None
    if fault is not None and first is not None:
        hung = fault.kind is FaultKind.HANG
        lines += ["Root Cause (first observed failure):", *_failed(fault.rank, first, hung, fault.rank in hidden)]
    others = {rank: failure for rank, failure in failures.items() if failure is not first}
    if others and first is not None:
        lines.append("Other failures:")
    elif others:
        lines.append("Failures on this node, after that of another:")
    for rank, failure in others.items():
        lines += _failed(rank, failure, False, rank in hidden)
    return "\n".join(lines)


def _failed(rank: int, failure: Any, ended_by_us: bool, hidden: bool) -> Iterator[str]:
    if failure.exitcode < 0:
        number = f" ({failure.signal_name()})"
    else:
        number = ""
    if ended_by_us:
        end = "ended by the launcher"
    else:
        end = f"exitcode: {failure.exitcode}{number}"
    file = f"error_file: {failure.error_file}"
    yield (
        f"  rank: {rank} (local_rank: {failure.local_rank}), {end} (pid: {failure.pid}), "
        f"time: {failure.timestamp_isoformat()}, {file}"
    )
    if hidden and isinstance(failure.message, dict):
        text = str(failure.message.get("extraInfo", {}).get("py_callstack", failure.message.get("message", "")))
        yield from (f"    {line}" for line in text.splitlines())


def goes_on(tier: str, step: int, on_disk: int, reached: int, steps_lost: int | None) -> str:
    """Returns from where a training goes on that has looked for state in memory, and how many steps are lost, in one
    line; empty: no state was used, and no step is lost as far as is known.

    Args:
        tier: where the state lay; a value of `StateTier`.
        step: of the state that was loaded; 0: none was.
        on_disk: the step of the checkpoint on disk; 0: the program has named none.
        reached: the last step that was reported before; 0: none was.
        steps_lost: how many steps are computed again; None: not known.
    """
    if step:
        where = f"from step {step} in {tier}"
        if tier == StateTier.FLUSH:
            where = f"from step {step}, which an earlier start wrote to --ft-memory-flush"
        if tier == StateTier.BUDDY:
            where = f"from step {step}, of which another node had a copy"
        if on_disk:
            where += f" (the checkpoint on disk has step {on_disk})"
        if steps_lost is None:
            return f"the training goes on {where}"
        return f"the training goes on {where}; {_are_lost(steps_lost)}"
    if on_disk and steps_lost:
        return f"the training goes on from its checkpoint on disk, step {on_disk}; {_are_lost(steps_lost)}"
    if not on_disk and reached:
        start = "the training goes on without state in memory, and names no checkpoint on disk"
        return f"{start}; without one {_are_lost(reached)}"
    return ""


def _are_lost(steps: int) -> str:
    return {0: "no step is lost", 1: "1 step is lost"}.get(steps, f"{steps:,} steps are lost")


def next_step(decision: Decision) -> str:
    """Returns the next step, its reason, and what is left of the budget, in one line: `next: restart - ...`."""
    step = f"{_NEXT}{decision.action.value} - {decision.reason}"
    if decision.action is Action.RESTART:
        step += f", {decision.restarts_left} left"
    if decision.wait_s:
        step += f", after a wait of {decision.wait_s:g} s"
    if decision.budget:
        step += f"; {decision.budget}"
    if decision.exit_code is None:
        return step
    return f"{step}; exit code {decision.exit_code}"


def of_interruption(record: Mapping[str, Any]) -> str:
    """Returns a rank's record of an interruption in a few words: `rank 3 raised ValueError`.

    Args:
        record: as the rank wrote it into the ranks' store; it may lack anything.
    """
    if record.get("collateral"):
        return f"rank {record.get('rank')} failed in consequence"
    kind = str(record.get("interruption"))
    words = _INTERRUPTIONS.get(kind, kind)
    if kind == "EXCEPTION" and record.get("error"):
        words = f"raised {record['error']}"
    return f"rank {record.get('rank')} {words}"


def level_one_summary(restarts_in_process: int, started_again: int, taken_over: int) -> str:
    """Returns what level 1 did in a run, in one line."""
    return (
        f"restarts in process: {restarts_in_process}; ranks started again alone: {started_again}; "
        f"cycles that had to end all the same: {taken_over}"
    )


def printable(text: str, keep: str = "\t") -> str:
    """Returns `text` with every control character escaped: a rank's text must not move the terminal's cursor, nor
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
    """Formats log lines of the launcher: each message is one printable line; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """As the parent's, of the escaped message."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """As the parent's, escaped."""
        return printable(super().formatException(ei), "\t\n")


class ConsoleFormatter(LineFormatter):
    """Formats log lines for the console: those of level INFO as other lines of the launcher, the others with their
    level."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        text = printable(record.message)
        if record.levelno != logging.INFO:
            text = f"{record.levelname}: {text}"
        return console_line(text, record.created)


def say(text: str) -> None:
    """Writes one line to standard error, with the time and the launcher's name before it, escaped. Never raises."""
    show(console_line(text, time.time()))


def answer(text: str) -> None:
    """Writes one line to standard error as the answer of a command, escaped. Never raises."""
    show(f"ft_launcher: {text}")


def show(text: str) -> None:
    """Writes one line to standard error, escaped. Never raises."""
    show_lines(printable(text), escape=False)


def show_lines(text: str, escape: bool = True) -> None:
    """Writes lines to standard error. Never raises.

    Args:
        escape: False: `text` is printable but for colours.
    """
    if escape:
        text = printable(text, "\t\n")
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # no standard error at all: it is None
        pass
