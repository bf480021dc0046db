"""P11: how long simulated nodes take to form a cycle, and what that costs the store, beside torch's dynamic handler.

The nodes are threads; what torch calls a rank is a node here. With our handler, one node has a process of its own and
hosts the store, as an agent does, and all other nodes share four processes. Each node brings a fault of 3 KiB and has
its ranks assigned. With torch's handler, the nodes use a store in a process of its own; that handler keeps all nodes in
one record, written by compare-and-set.

The first formation includes the time in which the nodes connect.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from .job import JobFailed
from .launchers import COMMON_ENVIRONMENT, OURS, ROOT, Launcher
from .ports import free_port
from .scenario import Outcome

PROCESSES = 4
CYCLES, CYCLES_OF_TORCH = 10, 2
IDLE_S = 20.0
BEAT_S = 2.0
MAX_OF_TORCH = 256


@contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process of `simulated_nodes`."""
    command = [sys.executable, "-m", "scripts.bench.simulated_nodes", *map(str, arguments)]
    environment = {**os.environ, **COMMON_ENVIRONMENT, **OURS.environment}
    with subprocess.Popen(
        command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=environment
    ) as child:
        try:
            yield child
        finally:
            child.kill()


class Nodes:
    """All nodes of one job."""

    def __init__(self, kind: str, count: int, stack: ExitStack) -> None:
        self._children = []
        share, first = max(1, count // PROCESSES), 0
        if kind == "ours":
            port, first = free_port(), 1
            self._children.append(stack.enter_context(process(kind, port, count, 0, 1)))
        else:
            server = stack.enter_context(process("serve"))
            assert server.stdout is not None
            port = int(server.stdout.readline())
        for begin in range(first, count, share):
            words = (kind, port, count, begin, min(share, count - begin))
            self._children.append(stack.enter_context(process(*words)))
        self._count = count
        self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        lines = [child.stdout.readline() for child in self._children if child.stdout is not None]
        if not all(lines):
            raise JobFailed("simulated nodes ended before their time")
        return [json.loads(line) for line in lines]

    def ask(self, line: str) -> tuple[list[dict[str, Any]], Counter[str]]:
        """Answers of all processes, and the operations of all nodes."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write(line + "\n")
            child.stdin.flush()
        answers = self._answers()
        return answers, sum((Counter(one["operations"]) for one in answers), Counter[str]())

    def form(self) -> tuple[float, Counter[str]]:
        """Seconds from the first node's begin to the last one's place, and the operations."""
        answers, operations = self.ask("form")
        ranks = sorted(rank for one in answers for rank in one["ranks"])
        if ranks != list(range(self._count)):
            raise JobFailed(f"{self._count} nodes have the ranks {ranks[:8]}...")
        return max(one["done"] for one in answers) - min(one["begun"] for one in answers), operations


def cycles(launcher: Launcher, nodes: int, outcome: Outcome) -> None:
    """Some cycles of one job, and a time in which nothing happens."""
    if launcher.name == OURS.name:
        kind, cycles_of_job = "ours", CYCLES
    elif nodes <= MAX_OF_TORCH:
        kind, cycles_of_job = "torch", CYCLES_OF_TORCH
    else:
        return  # the first formation of 256 took minutes
    with ExitStack() as stack:
        simulated = Nodes(kind, nodes, stack)
        first_s, _ = simulated.form()
        outcome.add("first_s", first_s)
        took, spent = [], Counter[str]()
        for _ in range(cycles_of_job):
            seconds, operations = simulated.form()
            took.append(seconds)
            spent += operations
        outcome.add("form_s", statistics.median(took))
        outcome.add("form_a_node_ms", 1000 * statistics.median(took) / nodes)
        outcome.add("form_ops_a_node", sum(spent.values()) / len(took) / nodes)
        simulated.ask(f"idle {2 * BEAT_S}")  # what is left of the last cycle is removed
        _, idle = simulated.ask(f"idle {IDLE_S}")
        outcome.add("idle_ops_a_node_and_beat", sum(idle.values()) / nodes / (IDLE_S / BEAT_S))


def connects(nodes: int, outcome: Outcome) -> None:
    """Each node connects once."""
    with ExitStack() as stack:
        seconds, _ = Nodes("connect", nodes, stack).form()
        outcome.add("form_s", seconds)
        outcome.add("first_s", seconds)
