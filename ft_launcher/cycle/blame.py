"""Who held up the others when a restart in process was asked for, by what the monitors said just before it.

`in_process.py` uses it, in jobs of one node. The interruption aborts the collectives of all ranks within milliseconds:
an answer that a monitor sent after that shows a rank outside of all, and would have it blamed. So answers are asked for
when the first rank is about to exceed its limit, and only those that were sent before it did are looked at.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ft_launcher.attribution import RankEvidence, collective, first_failure
from ft_launcher.attribution.collective import Blame, Finding
from ft_launcher.ranks.monitors import NodeMonitors
from rank_monitor.contract.wire.messages import Restarter

_FIRST_ASKS_FOR_S = 1.0
"""All ranks exceed their limits at nearly the same moment: the first is answered for all."""
_ANSWERS_S = 0.5
"""After the interruption; answers come in milliseconds, and a late one cannot be used."""


class BlameOfInterruption:
    """Of one cycle on this node.

    Args:
        monitors: of this node, which have all ranks of the job.
    """

    def __init__(self, monitors: NodeMonitors) -> None:
        self._monitors = monitors
        self._asked_at = 0.0
        self._asked_ns = 0
        self._due: float | None = None
        self._call = ("", 0)
        """Prefix of the keys of the wrapper's call, and its iteration."""
        self._interrupted: tuple[str, int] | None = None

    def heard(self, message: Restarter) -> None:
        """Takes where the wrapper is: which call, and which iteration of it."""
        if message.prefix:
            self._call = message.prefix, message.iteration

    def ask(self, now: float) -> None:
        """Asks all monitors, unless they were asked a moment ago."""
        if now >= self._asked_at + _FIRST_ASKS_FOR_S:
            self._asked_at, self._asked_ns = now, time.monotonic_ns()
            self._monitors.ask_readings(stacks=True)

    def interrupted(self, now: float) -> None:
        """Takes that a rank was asked to restart."""
        if self._interrupted != self._call and now < self._asked_at + _FIRST_ASKS_FOR_S:
            self._due, self._interrupted = now + _ANSWERS_S, self._call

    def next_check(self) -> float | None:
        """When `is_due` should be asked (monotonic seconds); None: nothing is awaited."""
        return self._due

    def is_due(self, now: float) -> bool:
        """Whether a restart was asked for, and all answers are there or too late."""
        return self._due is not None and (now >= self._due or self._are_in_time())

    def find(self, ranks: Sequence[RankEvidence]) -> tuple[str, int, Blame, str] | None:
        """Returns the prefix of the call's keys, the iteration that ended, who held up the others in it, and that in
        words; None where an answer is missing or came too late, or nobody waited for anybody.

        Args:
            ranks: evidence of all ranks of the job.
        """
        self._due = None
        if len(ranks) < 2 or self._interrupted is None or not self._are_in_time():
            return None
        seen = [replace(rank, snapshot=self._monitors.found(rank.local_rank).reading) for rank in ranks]
        views = first_failure.views(seen, None)
        blame = collective.find(views)
        if not blame.waiting and not blame.ranks:
            return None
        text = blame.text
        if blame.ranks:
            first = next(view for view in views if view.rank == blame.ranks[0])
            text = f"rank {first.rank} {collective.sentence(blame, first)}"
            if blame.finding is not Finding.GONE and first.scene.own_frame:
                text += f"; it is at {first.scene.own_frame}"
        return *self._interrupted, blame, text

    def _are_in_time(self) -> bool:
        """Whether all monitors have answered, before the first rank was asked to restart."""
        found = [self._monitors.found(local_rank) for local_rank in self._monitors.local_ranks]
        interrupted = [one.interrupted_ns for one in found if one.interrupted_ns >= self._asked_ns]
        if not interrupted:
            return False
        return all(
            one.reading is not None and self._asked_ns <= one.reading_sent_ns < min(interrupted) for one in found
        )
