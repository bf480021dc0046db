"""Warnings about hangs while a cycle runs: ranks that stand still, limits that cannot act, and NCCL's bound.

Called by `ranks.py`. Asks the monitors and reports through the recorder, once for all ranks of the node; stops
no rank.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from ft_launcher.agent.parts import NodeParts
from ft_launcher.agent.unwatched import Unwatched
from ft_launcher.attribution.scene import Scene
from ft_launcher.processes.process_tree import is_stopped
from ft_launcher.ranks import nccl
from ft_launcher.ranks.monitors import NodeMonitors
from ft_launcher.ranks.rank_context import RankContext
from rank_monitor.contract.wire.launcher_messages import Verdict
from rank_monitor.contract.wire.messages import GroupMade

logger = logging.getLogger(__name__)


class HangWarnings:
    """The warnings of one job on this node."""

    def __init__(self, parts: NodeParts, monitors: NodeMonitors) -> None:
        self._parts, self._monitors = parts, monitors
        self._unwatched = Unwatched(parts.limits_set, parts.settings.monitor.unwatched_warning)
        self._stall_shown_at = 0.0
        self._nccl_shown = False

    def begin_cycle(self) -> None:
        """Forgets the ranks of the last cycle."""
        self._stall_shown_at = 0.0
        self._unwatched.begin_cycle()

    def next_check(self) -> float | None:
        """When `attend` should be called (monotonic seconds); None: nothing is due."""
        return self._unwatched.next_check()

    def made_group(self, local_rank: int, group: GroupMade) -> None:
        """Notes that a rank made its process group. Logs NCCL's bound on a hang at the first group that uses NCCL."""
        self._unwatched.made_group(local_rank, time.monotonic())
        # Only here: a bound on a hang in NCCL means nothing to a job that runs on gloo.
        if "nccl" in group.backends and not self._nccl_shown:
            self._nccl_shown = True
            logger.info("%s", self._parts.nccl_bound)

    def attend(self, cycle: int, workers: Sequence[Any]) -> None:
        """Warns of limits that cannot act, if the time for that has come. Does not block."""
        due = self._unwatched.next_check()
        if due is None or time.monotonic() < due:
            return
        local_ranks = range(len(workers))
        self._unwatched.watched(
            local_rank for local_rank in local_ranks if self._monitors.found(local_rank).was_attached
        )
        if self._unwatched.next_check() is not None:
            settings = self._parts.settings
            collective = nccl.collective_timeout(settings.nccl, os.environ)
            ranks = [int(workers[local_rank].global_rank) for local_rank in self._unwatched.ranks]
            self._parts.recorder.cannot_act(cycle, self._unwatched.warning(ranks, settings.monitor, collective))

    def stalled(self, cycle: int, stall: Verdict, workers: Sequence[Any], ranks: RankContext) -> bool:
        """Reports ranks that stand still: where each rank of the node is, with stacks.

        Returns:
            False when the last report already covered this stall: it began before that report.
        """
        # All ranks wait for the one that stands still, so each monitor reports a stall; the first report shows all.
        if time.monotonic() - stall.waited_s <= self._stall_shown_at:
            return False
        self._monitors.snapshots(stacks=True)
        self._stall_shown_at = time.monotonic()
        found = self._scenes(workers, ranks)
        self._parts.recorder.stalled(cycle, stall, found, self._monitors.stack_file)
        return True

    def _scenes(self, workers: Sequence[Any], ranks: RankContext) -> dict[int, Scene]:
        """Returns where each running rank is, by local rank, from the snapshots that its monitor has just sent."""
        found = {}
        pids = ranks.pids()
        for local_rank in sorted(ranks.pidfds):
            snapshot = self._monitors.found(local_rank).snapshot
            frames, process = (snapshot.frames, snapshot.process) if snapshot else ([], {})
            if is_stopped(pids[local_rank]):  # its monitor may be stopped too
                process = {"state": "T (stopped)"}
            found[local_rank] = Scene(int(workers[local_rank].global_rank), frames, process)
        return found
