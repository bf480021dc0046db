"""Warnings about hangs while a cycle runs. Asks the monitors, and reports through the recorder; stops no rank.

There are three, each once for all ranks of the node:
- ranks stand still: who waits for whom, and what would end that (`stalled`),
- limits that the user set cannot act, since nobody calls the client in the training (`poll`),
- how long a hang in NCCL may last (`made_group`).

`ranks.py` calls the methods on the agent's thread; `composition.py` calls `limits_set`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence

from ft_launcher.agent.cycle.evidence import gather
from ft_launcher.agent.parts import NodeParts
from ft_launcher.decide.attribution import collective, rank_view
from ft_launcher.decide.attribution.fault import HangKind
from ft_launcher.decide.attribution.rank_view import RankView
from ft_launcher.decide.attribution.scene import Scene, about_stall, numbered
from ft_launcher.node.monitors.monitors import NodeMonitors
from ft_launcher.node.ranks import nccl
from ft_launcher.node.ranks.rank_context import RankContext
from ft_launcher.record.journal.contained import contained
from ft_launcher.record.placement import Placement
from ft_launcher.settings.options import flag_of
from ft_launcher.settings.sources import DEFAULT
from rank_monitor.contract.processes.proc import is_stopped
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.launcher_messages import Verdict
from rank_monitor.contract.wire.messages import GroupMade

logger = logging.getLogger(__name__)

# The limits of heartbeats and sections count from `init_workload_monitoring()` on. All others act without the client.
_NEED_A_CLIENT = (
    "initial_rank_heartbeat_timeout",
    "rank_heartbeat_timeout",
    "rank_section_timeouts",
    "rank_out_of_section_timeout",
)
# Mostly all ranks are concerned, and the warning is one line.
_MAX_NAMED = 4


def limits_set(settings: MonitorSettings, sources: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the options that the user set to a limit and that act only in a training which the client watches.

    Args:
        settings: of the monitors.
        sources: name of a setting -> where its value came from.
    """
    return tuple(
        flag_of(key) for key in _NEED_A_CLIENT if sources.get(key, DEFAULT) != DEFAULT and getattr(settings, key)
    )


class HangWarnings:
    """The warnings of one job on this node.

    Args:
        parts: of this launcher.
        monitors: of this node.
    """

    def __init__(self, parts: NodeParts, monitors: NodeMonitors) -> None:
        self._parts, self._monitors = parts, monitors
        self._stall_shown_at = 0.0
        self._nccl_shown = False
        self._due: dict[int, float] = {}
        """Local rank with a process group -> when to warn that limits cannot act (monotonic seconds)."""
        self._warned = False

    def begin_cycle(self) -> None:
        """Resets what is known of the ranks of the last cycle."""
        self._stall_shown_at = 0.0
        self._due = {}

    def next_check(self) -> float | None:
        """Returns when `poll` should be called (monotonic seconds); None: nothing will be due."""
        return min(self._due.values(), default=None)

    def made_group(self, local_rank: int, group: GroupMade) -> None:
        """Notes that a rank made its process group: from now on the client should be called soon.

        Logs NCCL's bound on a hang at the first group of the job that uses NCCL.
        """
        wait_s = self._parts.settings.monitor.unwatched_warning
        if self._parts.limits_set and wait_s is not None and not self._warned:
            # A rank may make several groups; the wait counts from the first.
            self._due.setdefault(local_rank, time.monotonic() + wait_s)
        # Only here: a bound on a hang in NCCL means nothing to a job that runs on gloo.
        if "nccl" in group.backends and not self._nccl_shown:
            self._nccl_shown = True
            logger.info("%s", self._parts.nccl_bound)

    def poll(self, placement: Placement) -> None:
        """Warns that limits cannot act, if the time has come and ranks are not watched: once in a job. Does not
        block."""
        due = self.next_check()
        if due is None or time.monotonic() < due:
            return
        self._due = {rank: due for rank, due in self._due.items() if not self._monitors.report(rank).was_attached}
        if self._due:
            ranks = [placement.ranks[local_rank].rank for local_rank in sorted(self._due)]
            self._warned, self._due = True, {}
            self._parts.recorder.cannot_act(placement.cycle, self._cannot_act(ranks))

    def _cannot_act(self, ranks: Sequence[int]) -> str:
        """Returns the text of the warning about these ranks (global), which nobody watches."""
        settings = self._parts.settings
        named = ", ".join(map(str, ranks[:_MAX_NAMED])) + (", ..." if len(ranks) > _MAX_NAMED else "")
        stall = settings.monitor.stall_warning
        if stall is None:
            log = "is off"
        else:
            log = f"warns in the log when a main thread stands still for {stall:g} s"
        return (
            f"{', '.join(self._parts.limits_set)} cannot act: no init_workload_monitoring() "
            f"{settings.monitor.unwatched_warning:g} s after the process group was made (rank {named}). Add two lines "
            f"to the script: `import ft_client as ft; ft.init()`, and `for batch in ft.steps(loader):` in place of "
            f"`for batch in loader:`. Until then two things see a hang: --ft-stall-warning {log}, and "
            f"{nccl.collective_timeout(settings.nccl, os.environ)}"
        )

    def stalled(self, placement: Placement, stall: Verdict, ranks: RankContext) -> bool:
        """Reports ranks that stand still: who waits for whom, what would end that, and the stacks of this node's ranks.

        Blocks for a second at most, while the monitors answer.

        Args:
            placement: of this node in the cycle.
            stall: the verdict of the monitor that reported the stall.
            ranks: the processes.

        Returns:
            False: the last report has covered this stall already, since the stall began before it.
        """
        # All ranks wait for the one that stands still, so each monitor reports a stall. The first report shows all.
        if time.monotonic() - stall.waited_s <= self._stall_shown_at:
            return False
        self._monitors.snapshots(stacks=True)
        self._stall_shown_at = time.monotonic()
        found = self._scenes(placement, ranks)
        text = about_stall(list(found.values()), stall.rank, round(stall.waited_s, 1))
        with contained("who waits for whom cannot be found"):
            views = rank_view.views(gather(placement.ranks, ranks, self._monitors), None)
            text = _who_waits(views, placement.is_alone, stall.waited_s) or text
        self._parts.recorder.stalled(placement.cycle, text, self._what_ends(), found, self._monitors.stack_file)
        return True

    def _what_ends(self) -> str:
        """Returns what ends a hang: the limit, or the option that would set one."""
        limit_s = self._parts.settings.monitor.hang_timeout
        if limit_s is None:
            return "--ft-hang-timeout SECONDS would end a hang, and restart the job as --max-restarts allows"
        return f"--ft-hang-timeout ends a hang after {limit_s:g} s"

    def _scenes(self, placement: Placement, ranks: RankContext) -> dict[int, Scene]:
        """Returns where each running rank is, by local rank, from the snapshots that its monitor has just sent."""
        found = {}
        pids = ranks.pids()
        for local_rank in sorted(ranks.pidfds):
            snapshot = self._monitors.report(local_rank).snapshot
            frames, process = (snapshot.frames, snapshot.process) if snapshot else ([], {})
            if is_stopped(pids[local_rank]):  # its monitor may be stopped too
                process = {"state": "T (stopped)"}
            found[local_rank] = Scene(placement.ranks[local_rank].rank, frames, process)
        return found


def _who_waits(views: Sequence[RankView], all_ranks: bool, waited_s: float) -> str:
    """Returns who holds up the others by torch's flight recorder; empty: it does not say.

    Args:
        views: of the ranks of this node.
        all_ranks: these are all ranks of the job.
    """
    finding = collective.find_culprits(views, all_ranks)
    if not (finding.culprits and finding.text):
        return ""
    scene = next(view.scene for view in views if view.rank == finding.culprits[0])
    text = f"{numbered(finding.culprits)} {collective.sentence(finding, scene)}, for {waited_s:.1f} s"
    if scene.own_frame and finding.kind is not HangKind.GONE:
        text += f"; rank {scene.rank} is at {scene.own_frame}"
    return text
