"""The process of one health check: reads its task from the command line, makes one check, prints one line of JSON.

Started by `node/health/check_process.py`, one process for each check: a driver or a file system that hangs then hangs
that process, and not the launcher. `reading.py` reads the line in the launcher. The process imports one check only, and
nothing outside the standard library that this check does not need. It exits without finalizing the interpreter, since
threads of a driver's library might block that for ever.
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
"""The state of one item that a check looks at (a GPU, a mount), and the reason. The reason names the item, and is empty
where there is nothing to report."""
Answer: TypeAlias = tuple[list[Finding], dict[str, Any]]
"""The findings of a check, and JSON values that the next check of this kind gets as `Task.memory`: counters, say, whose
growth matters."""

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
"""Name of a check -> the module and the function that make it. The function gets a `Task` and returns an `Answer`."""

# The order in which states win over each other. `unknown` stands above `ok`, so that an item which could not be read is
# shown. Only `unhealthy` makes a node leave.
_WORST_FIRST: tuple[State, ...] = ("unhealthy", "warning", "unknown", "ok", "not present")


class Task(NamedTuple):
    """What a check gets.

    Attributes:
        work: what to check: paths, addresses, limits; its keys depend on the check.
        memory: what the last check of this kind returned as its memory; empty at first.
        say: prints a line about the progress. Where a check hangs, its last such line is all that is known, and becomes
            part of the reason.
    """

    work: dict[str, Any]
    memory: dict[str, Any]
    say: Callable[[str], None]


def worst(findings: Iterable[Finding]) -> Finding:
    """Returns the worst state among findings, with the reasons of all findings in that state; `not present` for
    none."""
    found = list(findings)
    states = {state for state, _ in found}
    for candidate in _WORST_FIRST:
        if candidate in states:
            return candidate, "; ".join(reason for state, reason in found if state == candidate and reason)
    return "not present", ""


def main() -> None:
    """Makes the check that the last argument of the command line describes as JSON, and exits. Never returns."""
    order = json.loads(sys.argv[-1])
    sys.path.extend(order["site"])
    module, function = CHECKS[order["check"]]
    check = getattr(importlib.import_module(module), function)
    findings, memory = check(Task(order["work"], order["memory"], _say))
    _say(json.dumps({"findings": findings, "memory": memory}))
    os._exit(0)


def _say(line: str) -> None:
    print(line, flush=True)
