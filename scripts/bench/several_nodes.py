"""P3 and P4: a crash with several agents on this machine, and the loss of a node, each to all ranks' group ready."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import TracebackType

from .job import Job, JobFailed, descendants
from .launchers import OURS, WORKER, Launcher
from .one_node import crash_each_cycle
from .ports import free_port
from .scenario import Outcome

RANKS = 2
"""Per agent."""

CRASHES = 3
TIMEOUT_S, BEAT_S = 2.0, 0.5


@dataclass(frozen=True)
class AgentOf(Launcher):
    """A launcher as one agent of several: `nodes` is what --nnodes says, `endpoint` where they meet."""

    nodes: str = ""
    endpoint: str = ""
    is_host: bool = True

    def command(self, ranks: int, max_restarts: int, flags: Sequence[str], arguments: Sequence[str]) -> list[str]:
        """The command line of one agent."""
        meet = [f"--nnodes={self.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.endpoint}", "--rdzv-id=bench"]
        conf = f"--rdzv-conf=last_call_timeout=1,is_host={int(self.is_host)}"
        layout = [*meet, conf, f"--nproc-per-node={RANKS}"]
        words = [*layout, f"--max-restarts={max_restarts}", *self.flags, *flags]
        return [self.python, "-m", self.module, *words, str(WORKER), *arguments]


class Nodes(Job):
    """Some agents of one job; the first hosts the store."""

    def __init__(
        self, launcher: Launcher, agents: int, nodes: str, arguments: Sequence[str], flags: Sequence[str], restarts: int
    ) -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        same = {field.name: getattr(launcher, field.name) for field in fields(Launcher)}
        first = AgentOf(**same, nodes=nodes, endpoint=endpoint)
        super().__init__(first, agents * RANKS, arguments, flags, restarts)
        command = replace(first, is_host=False).command(RANKS, restarts, flags, arguments)
        self.others = [self._start(command) for _ in range(agents - 1)]

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, trace)
        for other in self.others:
            other.wait(10)

    def lose(self, node: subprocess.Popen[bytes]) -> int:
        """SIGKILL to an agent and all below it; returns the moment."""
        below = descendants(node.pid)
        at = time.monotonic_ns()
        for pid in (node.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return at

    def end_well(self, limit_s: float = 60) -> None:
        """Waits for the agents; one that was lost may have died by SIGKILL."""
        codes = [process.wait(limit_s) for process in (self.process, *self.others)]
        if any(code not in (0, -signal.SIGKILL) for code in codes):
            raise JobFailed(f"exit codes {codes}; {self.last_output()}")


def crashes(launcher: Launcher, agents: int, outcome: Outcome) -> None:
    """P3: one job with some crashes, each on another rank."""
    with Nodes(launcher, agents, str(agents), ["crash", str(CRASHES)], (), CRASHES) as job:
        crash_each_cycle(job, CRASHES, outcome)
        job.end_well()


def loss(
    launcher: Launcher, agents: int, outcome: Outcome, timeout_s: float = TIMEOUT_S, beat_s: float = BEAT_S
) -> None:
    """P4: the last of two or three agents is lost: the other goes on alone, or a spare takes its place."""
    if agents == 3:
        nodes, goes_on, spares = "2", 2 * RANKS, ["--ft-spares=1"]
    else:
        nodes, goes_on, spares = "1:2", RANKS, []
    flags: list[str] = []
    waited = 0.0
    if launcher.module == OURS.module:
        flags = [f"--ft-node-timeout={timeout_s}", f"--ft-node-beat={beat_s}", *spares]
        waited = timeout_s
    with Nodes(launcher, agents, nodes, ["crash", "0"], flags, 1) as job:
        ready = job.wait_ranks("ready", count=2 * RANKS)
        members = {s.pid for s in ready}
        lost = next(node for node in job.others if members & set(descendants(node.pid)))
        at = job.lose(lost)
        back = job.wait_ranks("ready", 1, count=goes_on, deadline_s=120)
        outcome.add("beyond_timeout_s", (max(s.t for s in back) - at) / 1e9 - waited)
        for cycle in (0, 1):
            job.tell(f"go.{cycle}")
        job.end_well()
