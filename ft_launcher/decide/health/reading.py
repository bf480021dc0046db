"""What is ordered from the process of a check, the reading that its end gives, and what readings say of the node. Pure.

A check of ours answers with one line of JSON, the last of its output; the lines before it report progress. A command
of the user answers with its exit code. A round of readings gives the node's state, and what has changed since the round
before. Knows no check by name, and starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_launcher.decide.attribution import signal_name
from ft_launcher.decide.health.check import State, worst

# Characters of a line that a user's command or a check printed, in one line of the console.
_LINE_LENGTH = 300


@dataclass(frozen=True)
class Order:
    """What to start for a check.

    Attributes:
        argv: the command line of the process.
        answers: the process prints its findings as JSON; else its exit code is the result.
        late: the state of the reading when no answer comes in time. `warning`, of the launcher's own folders, which the
            training can do without: it stays one where the process hangs in the kernel, and the process is not killed;
            later rounds do not wait for that folder before this one has its answer.
    """

    check: str
    argv: Sequence[str]
    answers: bool
    late: State


@dataclass(frozen=True)
class Reading:
    """The result of one check.

    Attributes:
        state: `unknown` is what could not be read, `warning` what the training can do without; only `unhealthy` is
            a reason to leave the job.
        took_s: seconds from the start of its process; 0 for what was read without one.
    """

    check: str
    state: State
    reason: str
    took_s: float = 0.0


@dataclass(frozen=True)
class NodeState:
    """Whether the node may take part in the next cycle, and why."""

    healthy: bool
    reason: str


@dataclass(frozen=True)
class HealthChange:
    """A check found another state than at its last reading."""

    check: str
    before: State
    state: State
    reason: str


def reading_of_exit(order: Order, output: bytes, code: int, took_s: float) -> tuple[Reading, dict[str, Any]]:
    """The reading of a process that ended by itself, and the memory that the check is to get next time.

    Args:
        output: the last part of what it wrote.
        code: its exit code, negative for a signal.
    """
    last = _last_line(output)
    if code < 0:
        ending = f"died of {signal_name(-code)}"
    else:
        ending = f"exit code {code}"
    if not order.answers:
        if code == 0:
            return Reading(order.check, "ok", last, took_s), {}
        if last:
            ending = f"{ending}: {last}"
        return Reading(order.check, "unhealthy", ending, took_s), {}
    try:
        answer = json.loads(output.splitlines()[-1])
        state, reason = worst((state, reason) for state, reason in answer["findings"])
        return Reading(order.check, state, reason, took_s), dict(answer["memory"])
    except (ValueError, LookupError, TypeError):
        return Reading(order.check, "unknown", f"the check itself failed ({ending}): {last}", took_s), {}


def reading_of_timeout(order: Order, output: bytes, took_s: float, left_pid: int | None) -> Reading:
    """The reading of a process that did not end in time.

    Args:
        left_pid: its pid when SIGKILL did not end it either: it hangs inside the kernel, which is evidence enough
            against storage or a driver.
    """
    last = _last_line(output)
    reason = f"no answer within {took_s:.3g} s"
    if last:
        reason = f"{reason}; the last it said: {last}"
    if left_pid is not None:
        reason = f"{reason}; process {left_pid} hangs in the kernel"
        if order.late != "warning":
            return Reading(order.check, "unhealthy", reason, took_s)
    return Reading(order.check, order.late, reason, took_s)


def node_state(readings: Sequence[Reading]) -> NodeState:
    """The state of the node with these readings: unhealthy when a reading is; no other state of a reading counts."""
    state, reason = worst((reading.state, f"{reading.check}: {reading.reason}") for reading in readings)
    if state == "unhealthy":
        return NodeState(False, reason)
    states = [f"{reading.check} {reading.state}" for reading in readings if reading.state != "not present"]
    return NodeState(True, ", ".join(states) or "nothing to check")


def changes(before: Mapping[str, State], readings: Iterable[Reading]) -> tuple[list[HealthChange], dict[str, State]]:
    """Returns what changed, and the state of each check now.

    Args:
        before: the states of the last round; a check that is not in it was in order.
    """
    findings: dict[str, list[tuple[State, str]]] = {}
    for reading in readings:
        findings.setdefault(reading.check, []).append((reading.state, reading.reason))
    now = {check: worst(found) for check, found in findings.items()}
    found = []
    for check, (state, reason) in now.items():
        last = before.get(check, "ok")
        if _is_in_order(last) and _is_in_order(state):
            continue
        if state != last:
            found.append(HealthChange(check, last, state, reason))
    return found, {check: state for check, (state, _) in now.items()}


def _is_in_order(state: State) -> bool:
    return state in ("ok", "not present")


def _last_line(output: bytes) -> str:
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        return ""
    return "".join(letter if letter.isprintable() else "?" for letter in lines[-1])[:_LINE_LENGTH]
