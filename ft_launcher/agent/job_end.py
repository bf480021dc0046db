"""How a job ends for this node: the membership returns or raises it, and the node agent hands it to torch."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.elastic.agent.server.api import RunResult


@dataclass(frozen=True)
class JobEnd:
    """How the job ended on this node: the launcher's exit code (None: as torch chooses), why, and torch's result."""

    exit_code: int | None
    reason: str
    result: RunResult


class NoFurtherCycle(Exception):
    """This node takes part in no further cycle; `end` says how the job ended for it."""

    def __init__(self, end: JobEnd) -> None:
        super().__init__(end.reason)
        self.end = end
