"""The process of a check: reads its order, looks, answers with one line of JSON. Imports one check only.

It leaves without taking the interpreter down: a library of a driver may have threads that would hold it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from ft_launcher.health.finding import Task


def main() -> None:
    """Never returns. The order is the last word of the command line."""
    order = json.loads(sys.argv[-1])
    sys.path.extend(order["site"])
    check = importlib.import_module(f"ft_launcher.health.{order['check']}")
    findings, memory = check.look(Task(order["work"], order["memory"], _say))
    _say(json.dumps({"findings": findings, "memory": memory}))
    os._exit(0)


def _say(line: str) -> None:
    print(line, flush=True)
