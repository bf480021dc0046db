"""What the console hears of hangs while a cycle runs: ranks that stand still, limits that do nothing, NCCL's bound.

It acts: asks the monitors, and has the recorder say it. Each warning comes once for all ranks of the node.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from ft_launcher import nccl
from ft_launcher.attribution.scene import Scene
from ft_launcher.monitors import NodeMonitors
from ft_launcher.node_parts import NodeParts
from ft_launcher.process_tree import is_stopped
from ft_launcher.rank_context import RankContext
from ft_launcher.unwatched import Unwatched
from rank_monitor.contract.launcher_messages import Verdict
from rank_monitor.contract.messages import GroupMade

logger = logging.getLogger(__name__)


class HangWarnings:
    """The warnings of one job on this node."""

    def __init__(self, parts: NodeParts, monitors: NodeMonitors) -> None:
        self._parts, self._monitors = parts, monitors
        self._unwatched = Unwatched(parts.limits_given, parts.settings.monitor.unwatched_warning)
        self._stall_shown_at = 0.0
        self._nccl_shown = False

    def begin_cycle(self) -> None:
        """All ranks are new."""
        self._stall_shown_at = 0.0
        self._unwatched.begin_cycle()

    def next_check(self) -> float | None:
        """When `attend` should be called (monotonic seconds)."""
        return self._unwatched.next_check()

    def made_group(self, local_rank: int, group: GroupMade) -> None:
        """A rank made its process group; says how long a hang may last once it is known that the job uses NCCL."""
        self._unwatched.made_group(local_rank, time.monotonic())
        if "nccl" in group.backends and not self._nccl_shown:
            self._nccl_shown = True
            logger.info("%s", self._parts.nccl_bound)

    def attend(self, cycle: int, workers: Sequence[Any]) -> None:
        """Warns of limits that do nothing, if that is due."""
        if (due := self._unwatched.next_check()) is None or time.monotonic() < due:
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
        """Says once of all ranks that stand still since before, which one it is; False: that was said already."""
        if time.monotonic() - stall.waited_s <= self._stall_shown_at:
            return False
        self._monitors.snapshots(stacks=True)
        self._stall_shown_at = time.monotonic()
        found = self._scenes(workers, ranks)
        self._parts.recorder.stalled(cycle, stall, found, self._monitors.stack_file)
        return True

    def _scenes(self, workers: Sequence[Any], ranks: RankContext) -> dict[int, Scene]:
        """Where each rank that still runs is, by local rank, as its monitor found it just now."""
        found = {}
        pids = ranks.pids()
        for local_rank in sorted(ranks.pidfds):
            snapshot = self._monitors.found(local_rank).snapshot
            frames, process = (snapshot.frames, snapshot.process) if snapshot else ([], {})
            if is_stopped(pids[local_rank]):  # its monitor may be stopped too
                process = {"state": "T (stopped)"}
            found[local_rank] = Scene(int(workers[local_rank].global_rank), frames, process)
        return found
