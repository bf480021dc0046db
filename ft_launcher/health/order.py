"""The order for one check's process, and what is made of its end. Pure; starts nothing.

A check of ours answers with one line of JSON, the last of its output; lines before it say where it is. A command of
the user answers with its exit code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ft_launcher.attribution import signal_name
from ft_launcher.health.finding import State, worst
from ft_launcher.health.reading import Reading

_LINE_LENGTH = 300


@dataclass(frozen=True)
class Order:
    """What to start for a check.

    Attributes:
        argv: the words of the process.
        answers: it answers in JSON; else its exit code is the answer.
        late: what it means when no answer comes in time.
    """

    check: str
    argv: Sequence[str]
    answers: bool
    late: State


def understand(order: Order, output: bytes, code: int, took_s: float) -> tuple[Reading, dict[str, Any]]:
    """The reading of a process that ended by itself, and what the check wants to know again next time.

    Args:
        output: the end of what it wrote.
        code: its exit code, negative for a signal.
    """
    last = _last_line(output)
    how = f"died of {signal_name(-code)}" if code < 0 else f"exit code {code}"
    if not order.answers:
        state: State = "unhealthy" if code else "ok"
        return Reading(order.check, state, ": ".join(filter(None, (how if code else "", last))), took_s), {}
    try:
        answer = json.loads(output.splitlines()[-1])
        state, reason = worst((state, reason) for state, reason in answer["findings"])
        return Reading(order.check, state, reason, took_s), dict(answer["memory"])
    except (ValueError, LookupError, TypeError):
        return Reading(order.check, "unknown", f"the check itself failed ({how}): {last}", took_s), {}


def too_late(order: Order, output: bytes, took_s: float, left_pid: int | None) -> Reading:
    """The reading of a process that did not end in time.

    Args:
        left_pid: its pid when SIGKILL did not end it either: it hangs inside the kernel, which is evidence enough.
    """
    where = _last_line(output)
    reason = f"no answer within {took_s:.3g} s" + (f"; the last it said: {where}" if where else "")
    if left_pid is not None:
        return Reading(order.check, "unhealthy", f"{reason}; process {left_pid} hangs in the kernel", took_s)
    return Reading(order.check, order.late, reason, took_s)


def _last_line(output: bytes) -> str:
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    return "".join(letter if letter.isprintable() else "?" for letter in lines[-1])[:_LINE_LENGTH] if lines else ""
