"""torch's `SubprocessContext` with our start and stop: the seam for every way to start ranks.

torch's own replaces the signal handlers at each start and, when a rank fails, stops the others with a limit of its own
choosing; here handlers belong to `signals.py` and stops to `process_tree.py`. Uses torch's underscored `_start`,
`_close` and `_capture_process_failures`.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from ft_launcher.log_pump import LogPump, streams_of


@dataclass(frozen=True)
class RankExit:
    """The end of a rank: its code as from `subprocess`, and when it was seen (monotonic seconds)."""

    exit_code: int
    at: float


class RankContext(SubprocessContext):  # type: ignore[misc]
    """The ranks of one cycle on this node, each started by exec, each with a pidfd that tells its end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tail_logs: list[Any] = [LogPump(streams_of(self.name, vars(self)["_tail_logs"]))]
        self.pidfds: dict[int, int] = {}
        self.exits: dict[int, RankExit] = {}
        self.started_ns = 0

    def start(self) -> None:
        """Starts the ranks and the tails of their logs; touches no signal handler."""
        self.started_ns = time.monotonic_ns()
        self._start()
        for local_rank, pid in self.pids().items():
            self.pidfds[local_rank] = os.pidfd_open(pid)
        for tail in self._tail_logs:
            tail.start()

    def reap(self, local_rank: int) -> RankExit | None:
        """The end of a rank, once it ended; closes its pidfd."""
        if local_rank not in self.exits:
            exit_code = self.subprocess_handlers[local_rank].proc.poll()
            if exit_code is None:
                return None
            self.exits[local_rank] = RankExit(exit_code, time.monotonic())
            os.close(self.pidfds.pop(local_rank))
        return self.exits[local_rank]

    def reap_all(self) -> None:
        """Takes the exit codes of all ranks that ended."""
        for local_rank in range(self.nprocs):
            self.reap(local_rank)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """Called by torch to stop the ranks: they have been stopped by then; this takes what is left of them."""
        self.reap_all()
        for handler in self.subprocess_handlers.values():
            for stream in (handler._stdout, handler._stderr):
                if stream is not None:
                    stream.close()
