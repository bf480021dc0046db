"""The process of one check: reads its task, makes one check, prints findings as one line of JSON.

Started by `check_process.py`. It imports one check only, and nothing outside the standard library that this check does
not need. It exits without finalizing the interpreter: threads of a driver's library might block that.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

State: TypeAlias = Literal["ok", "unknown", "warning", "unhealthy", "not present"]
Finding: TypeAlias = tuple[State, str]
"""The state of one checked item, and the reason, which names the item; the reason is empty where there is nothing to
report."""
Answer: TypeAlias = tuple[list[Finding], dict[str, Any]]
"""The findings of a check, and what it wants to be given as `Task.memory` next time."""

CHECKS = {
    "endpoint": ("ft_launcher.node.health.endpoint", "check"),
    "gpu": ("ft_launcher.node.health.gpu", "check"),
    "gpu_memory": ("ft_launcher.node.health.gpu", "check_memory"),
    "gpu_processes": ("ft_launcher.node.health.gpu", "check_processes"),
    "mounts": ("ft_launcher.node.health.storage", "check_mounts"),
    "nic": ("ft_launcher.node.health.nic", "check"),
    "nvlink": ("ft_launcher.node.health.gpu", "check_links"),
    "space": ("ft_launcher.node.health.storage", "check_space"),
    "storage": ("ft_launcher.node.health.storage", "check"),
}
"""Check -> the module and the function that make it: Task -> Answer."""

# `unknown` stands above `ok`, so that what could not be read is shown; neither makes a node leave.
_WORST_FIRST: tuple[State, ...] = ("unhealthy", "warning", "unknown", "ok", "not present")


class Task(NamedTuple):
    """What a check is given.

    Attributes:
        work: what to check.
        memory: what it returned as its memory last time.
        say: prints its progress; of a check that never answers, only the last such line is known.
    """

    work: dict[str, Any]
    memory: dict[str, Any]
    say: Callable[[str], None]


def worst(findings: Iterable[Finding]) -> Finding:
    """The worst state, with the reasons of all findings in that state; `not present` when there is none."""
    found = list(findings)
    states = {state for state, _ in found}
    for candidate in _WORST_FIRST:
        if candidate in states:
            return candidate, "; ".join(reason for state, reason in found if state == candidate and reason)
    return "not present", ""


def main() -> None:
    """Makes the check that the last argument of the command line describes, as JSON. Never returns."""
    order = json.loads(sys.argv[-1])
    sys.path.extend(order["site"])
    module, function = CHECKS[order["check"]]
    check = getattr(importlib.import_module(module), function)
    findings, memory = check(Task(order["work"], order["memory"], _say))
    _say(json.dumps({"findings": findings, "memory": memory}))
    os._exit(0)


def _say(line: str) -> None:
    print(line, flush=True)
