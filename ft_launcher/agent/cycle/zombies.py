"""Detects ranks that have ended without an exit code: their main thread has ended while another lives on, or another
process, such as a debugger, holds their exit code.

Called by `agent/ranks.py` at each wake-up of the loop: no event reports an exit code in either case.

A rank alone may be on its way out. When all ranks of the node that have not ended are zombies, twice in a row, nobody
is left that could make progress, and no event will arrive: they are ended as a failure.
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

    `unreaped`: local ranks whose end was seen and whose exit code cannot be taken yet; their pidfds stay readable.
    """

    def __init__(self) -> None:
        self.unreaped: set[int] = set()
        self.are_all = False
        self._before: frozenset[int] = frozenset()
        self._next = time.monotonic() + SAMPLE_S

    def next_check(self) -> float:
        """When the next sample is due (monotonic seconds)."""
        return self._next

    def poll(self, ranks: RankContext) -> bool:
        """Takes a sample if one is due; returns whether all ranks are zombies."""
        # Events of other kinds call this too; only the time between samples makes two of them proof.
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + SAMPLE_S
            pids = {pid for local_rank, pid in ranks.pids().items() if local_rank in ranks.pidfds}
            self.sample(pids, {pid for pid in pids if is_zombie(pid)})
        return self.are_all

    def sample(self, running: Set[int], zombies: Set[int]) -> None:
        """Takes one sample: pids whose exit code was not taken yet, and those of them that are zombies.

        `are_all` says then whether all ranks were zombies in this sample and in the one before.
        """
        now: frozenset[int] = frozenset()
        if running <= zombies:
            now = frozenset(running)
        # The same pid in both: ranks that end one after the other are zombies for a moment each.
        self.are_all, self._before = bool(now & self._before), now

    def fault(self, evidence: Sequence[RankEvidence]) -> Fault | None:
        """Returns the fault of a cycle that ended because all ranks were zombies; None: they were not."""
        if not self.are_all:
            return None
        # A rank whose exit code is held by another process has ended for sure: it is named first.
        held = self.unreaped & {rank.local_rank for rank in evidence}
        first = next(rank for rank in evidence if not held or rank.local_rank in held)
        if held:
            why = "its exit code is held by another process, as a debugger"
        else:
            why = "other threads of it live on"
        what = f"hangs: it is a zombie, as all ranks of this node: its main thread has ended, and {why}"
        others = tuple(f"rank {rank.rank} was a zombie too" for rank in evidence if rank is not first)
        fault = Fault(FaultKind.HANG, first.rank, first.local_rank, first.pid, 1, what, "", "", others=others)
        return replace(fault, fault_class=FaultClass.HANG)
