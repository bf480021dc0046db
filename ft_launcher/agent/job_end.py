"""How a job ends for this node.

The membership returns a `JobEnd` where a cycle was the last one, and raises `NoFurtherCycle` where no cycle can be
formed. The node agent gives the result to torch, and `composition.py` takes the launcher's exit code from it. A signal
that ends the launcher is no `JobEnd`: torch's `SignalException` passes through the agent.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.elastic.agent.server.api import RunResult


@dataclass(frozen=True)
class JobEnd:
    """How the job ended on this node.

    Attributes:
        exit_code: of the launcher, as in docs/exit_codes.md; None: as torch chooses.
        reason: why the job ended, for the other nodes and the last line on the console; empty after a success.
        result: torch's, which says whether ranks failed, and what functions returned.
    """

    exit_code: int | None
    reason: str
    result: RunResult


class NoFurtherCycle(Exception):
    """This node takes part in no further cycle; `end` says how the job ended for it.

    Raised through torch's `_initialize_workers`, which has no other way to say so, and caught by `_invoke_run`.
    """

    def __init__(self, end: JobEnd) -> None:
        super().__init__(end.reason)
        self.end = end
