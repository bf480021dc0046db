"""Joins what a cycle left - exits and monitors' words - into evidence per rank. No decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ft_launcher.attribution import RankEvidence
from ft_launcher.monitors import NodeMonitors
from ft_launcher.rank_context import RankContext


def gather(
    workers: Sequence[Any], ranks: RankContext, monitors: NodeMonitors, stopped: set[int], killed: set[int]
) -> list[RankEvidence]:
    """Evidence of every local rank.

    Args:
        workers: torch's, in the order of local ranks.
        stopped: local ranks whose process was found stopped (SIGSTOP, a debugger) when the cycle failed.
        killed: pids that the stop had to kill.
    """
    pids = ranks.pids()
    evidence = []
    for worker in workers:
        local_rank = int(worker.local_rank)
        found, end = monitors.found(local_rank), ranks.exits.get(local_rank)
        evidence.append(
            RankEvidence(
                rank=int(worker.global_rank),
                local_rank=local_rank,
                pid=pids[local_rank],
                exit_code=end.exit_code if end else None,
                died_at=end.at if end else None,
                verdict=found.verdict,
                verdict_at=found.verdict_at,
                exception=found.exception,
                exception_at=found.exception_at,
                snapshot=found.snapshot,
                was_stopped=local_rank in stopped,
                killed_by_us=pids[local_rank] in killed,
            )
        )
    return evidence
