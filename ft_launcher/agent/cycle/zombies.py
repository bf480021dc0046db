"""Detects ranks that have ended without an exit code.

There are two cases. The rank's main thread has ended while another thread lives on. Or another process, such as a
debugger, holds the exit code. In both cases /proc shows a zombie, and no event ever reports an exit code: the job would
stand still for good.

A single zombie may be a rank on its way out, and is left alone. When all ranks of the node that have not ended are
zombies in two samples in a row, nobody is left that could make progress. The cycle then ends as a failure.

`agent/ranks.py` polls at each wake-up of the loop, and `agent/fault_finding.py` asks for the `fault` after the stop;
both on the agent's thread. Takes no exit code and ends no rank: `RankContext.reap` and `Ranks.stop` do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from dataclasses import replace

from ft_launcher.decide.attribution import Fault, FaultClass, FaultKind, RankEvidence
from ft_launcher.node.processes.process_tree import is_zombie
from ft_launcher.node.ranks.rank_context import RankContext

SAMPLE_S = 2.0
"""Seconds between two samples, so that a rank on its way out is not taken for a zombie. A sample is one short read."""


class Zombies:
    """The watch over the ranks of one cycle.

    Attributes:
        unreaped: local ranks whose end was seen and whose exit code cannot be taken yet. Their pidfds stay readable, so
            the loop must not wait for these. Filled by `agent/ranks.py`.
        are_all: whether all ranks were zombies in the last two samples.
    """

    def __init__(self) -> None:
        self.unreaped: set[int] = set()
        self.are_all = False
        self._before: frozenset[int] = frozenset()
        self._next = time.monotonic() + SAMPLE_S

    def next_check(self) -> float:
        """Returns when the next sample is due (monotonic seconds). `Ranks.poll` also reaps orphans at this moment, so
        that one wake-up of the loop serves both."""
        return self._next

    def poll(self, ranks: RankContext) -> bool:
        """Takes a sample if one is due; returns `are_all`."""
        # The loop also wakes for other events. Two samples are proof only with time between them.
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + SAMPLE_S
            pids = {pid for local_rank, pid in ranks.pids().items() if local_rank in ranks.pidfds}
            self.sample(pids, {pid for pid in pids if is_zombie(pid)})
        return self.are_all

    def sample(self, running: Set[int], zombies: Set[int]) -> None:
        """Takes one sample, and sets `are_all`.

        Args:
            running: pids of the ranks whose exit code was not taken yet.
            zombies: pids among these that are zombies.
        """
        now: frozenset[int] = frozenset()
        if running <= zombies:
            now = frozenset(running)
        # One pid must be a zombie in both samples: ranks that end one after the other are zombies for a moment each.
        self.are_all, self._before = bool(now & self._before), now

    def fault(self, evidence: Sequence[RankEvidence]) -> Fault | None:
        """Returns the fault of a cycle that ended because all ranks were zombies; None: they were not. Called by
        `fault_finding.py`; the fault counts where no rank failed by itself."""
        if not self.are_all:
            return None
        # A rank whose exit code another process holds has certainly ended, so the fault names it first.
        held = self.unreaped & {rank.local_rank for rank in evidence}
        first = next(rank for rank in evidence if not held or rank.local_rank in held)
        if held:
            reason = "its exit code is held by another process, as a debugger"
        else:
            reason = "other threads of it live on"
        what = f"hangs: it is a zombie, as all ranks of this node: its main thread has ended, and {reason}"
        others = tuple(f"rank {rank.rank} was a zombie too" for rank in evidence if rank is not first)
        fault = Fault(FaultKind.HANG, first.rank, first.local_rank, first.pid, 1, what, "", "", others=others)
        return replace(fault, fault_class=FaultClass.HANG)
