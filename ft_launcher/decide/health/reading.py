"""Readings of health checks: what a check process answered, and what all answers say of the node. Pure.

`node/health/check_process.py` starts a process for each `Order` and passes its output here. A check of ours answers by
one line of JSON, the last line of its output; the lines before report progress. A command of the user
(`--ft-node-check`) answers by its exit code. A process that does not answer in time gives a reading too.

All readings of a round together are the state of the node (`node_state`): before a cycle it decides whether the node
takes part. While ranks run, `changes` says what to report. Knows no check by name, and starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_launcher.decide.attribution import signal_name
from ft_launcher.decide.health.check import State, worst

# Characters of a line that a user's command or a check printed. The line becomes part of one line on the console.
_LINE_LENGTH = 300


@dataclass(frozen=True)
class Order:
    """What to start for one check.

    Attributes:
        check: the name of the check, for texts and the journal.
        argv: the command line of the process.
        answers: the process prints its findings as JSON; False: its exit code is the result.
        late: the state of the reading when no answer comes in time. It is `warning` for the launcher's own folders,
            which the training can do without. Then a process that hangs in the kernel still gives only a warning, is
            not killed, and later rounds do not ask for that folder again until it has answered.
    """

    check: str
    argv: Sequence[str]
    answers: bool
    late: State


@dataclass(frozen=True)
class Reading:
    """The result of one check.

    Attributes:
        check: the name of the check.
        state: `unknown`: something could not be read; `warning`: a fault that the training can do without;
            `unhealthy`: the only state for which a node leaves the job.
        reason: what was found; may be empty.
        took_s: seconds from the start of the check process; 0 for a value that was read without a process.
    """

    check: str
    state: State
    reason: str
    took_s: float = 0.0


@dataclass(frozen=True)
class NodeState:
    """Whether the node may take part in the next cycle, and the reason, which the console and the journal show."""

    healthy: bool
    reason: str


@dataclass(frozen=True)
class HealthChange:
    """A check found another state than at its last reading. Written to the journal while ranks run."""

    check: str
    before: State
    state: State
    reason: str


def reading_of_exit(order: Order, output: bytes, code: int, took_s: float) -> tuple[Reading, dict[str, Any]]:
    """Returns the reading of a check process that ended by itself, and the memory for the next check of this kind.

    A check of ours that prints no valid line failed itself, which says nothing of the node: its state is `unknown`.

    Args:
        output: the last part of what the process wrote.
        code: its exit code; minus the number of the signal that ended it.
        took_s: seconds from its start to its end.
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
    """Returns the reading of a check process that did not end in time.

    Args:
        output: what the process wrote until then; its last line says how far it came.
        took_s: seconds since its start.
        left_pid: its pid if SIGKILL did not end it either, else None. Such a process hangs inside the kernel, which is
            evidence enough against storage or a driver: the node is unhealthy, unless `order.late` is `warning`.
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
    """Returns the state of the node: unhealthy if at least one reading is. No other state of a reading counts."""
    state, reason = worst((reading.state, f"{reading.check}: {reading.reason}") for reading in readings)
    if state == "unhealthy":
        return NodeState(False, reason)
    states = [f"{reading.check} {reading.state}" for reading in readings if reading.state != "not present"]
    return NodeState(True, ", ".join(states) or "nothing to check")


def changes(before: Mapping[str, State], readings: Iterable[Reading]) -> tuple[list[HealthChange], dict[str, State]]:
    """Returns what changed since the last round, and the state of each check now.

    A change between `ok` and `not present` is none: both are in order.

    Args:
        before: the states of the last round, as this function returned them; a check without an entry was in order.
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
    """Returns the last line of an output that is not empty, cut and with each unprintable character as `?`."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        return ""
    return "".join(letter if letter.isprintable() else "?" for letter in lines[-1])[:_LINE_LENGTH]
