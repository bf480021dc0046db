"""The training's state in memory, as this launcher sees it cycle after cycle: what the ranks went on from, what they
have kept, and how many steps a fault has cost.

`ranks.py` makes one object, and calls it in the agent's thread; nothing here blocks. What was loaded the ranks say
(`StateLoaded`), all of them the same. What was saved is read off the node's folder once the ranks have ended
(`node/memory_files/node_memory.py`): a rank that was killed could not say it any more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict

from ft_launcher.node.memory_files.job_folder import JobFolder
from ft_launcher.node.memory_files.node_memory import NodeMemory
from ft_launcher.record import events
from ft_launcher.record.memory_recorder import MemoryRecorder
from rank_monitor.contract.wire.messages import StateLoaded

_MAX_LOOKS = 64
"""Looks that are kept: a training has one or two in each of its restarts in process."""


class StateInMemory:
    """What this launcher knows of the state in memory.

    Args:
        folder: of this node.
        recorder: writes its events.
        iterations_from_1: whether ranks report how many iterations they have done: the first one is number 1.

    Attributes:
        loaded: the last look of the ranks for state in the present cycle, between two cycles in the last one; None:
            they have not looked.
        copied: the newest step of which each buddy of this node has a copy, in the present or the last cycle; None: of
            none. `state_copies.py` sets it.
        kept: what the folder had when the ranks of the last cycle had ended; None: there was no such cycle, or no
            folder.
    """

    def __init__(self, folder: JobFolder, recorder: MemoryRecorder, iterations_from_1: bool = False) -> None:
        self.loaded: StateLoaded | None = None
        self.copied: int | None = None
        self.kept: NodeMemory | None = None
        self._looks: deque[str] = deque(maxlen=_MAX_LOOKS)
        """The looks of this cycle that are recorded. Of two that follow each other closely, some ranks report the
        second before others report the first."""
        self._folder = folder
        self._recorder = recorder
        self._first_iteration = int(iterations_from_1)
        self._done = 0
        """How many iterations the ranks of the last cycles had done when they ended, by what they reported to their
        monitors; 0 again once a look has counted it."""

    def cycle_begins(self) -> None:
        """Notes that the ranks of a cycle are about to start."""
        self.loaded = None
        self._looks.clear()

    def on_loaded(self, cycle: int, message: StateLoaded, has_rank0: bool) -> None:
        """Records a look for state in memory, by the first of the ranks that report it.

        Args:
            cycle: the present one.
            message: of a rank.
            has_rank0: whether this node tells the user.
        """
        if message.load in self._looks:
            return
        self._looks.append(message.load)
        self.loaded = message
        reached = max(message.reached, self._done)
        self._done = 0
        self._recorder.loaded(
            events.StateLoadedEvent(
                cycle,
                tier=str(message.tier),
                step=message.step,
                series=message.series,
                newer_than=message.newer_than,
                reached=reached,
                steps_lost=steps_lost(message, reached),
                refused=[asdict(refused) for refused in message.refused],
                world=message.world,
                saved_world=message.saved_world,
            ),
            has_rank0,
        )

    def cycle_over(self, cycle: int, started_ns: int, iteration: int) -> None:
        """Notes what the ranks have kept, once all of them have ended.

        Args:
            cycle: the one that is over.
            started_ns: when its ranks were started (monotonic nanoseconds).
            iteration: the last one that a rank of this node has reported to its monitor, when it was done; below 0:
                none has.
        """
        self._done = max(self._done, iteration + 1 - self._first_iteration)
        self.kept = self._folder.state(started_ns)
        if self.kept is not None and self.kept.reached is not None:
            self._recorder.saved(self._saved(cycle, self.kept))

    def saved(self, cycle: int, started_ns: int) -> events.StatesSavedEvent | None:
        """Returns what the ranks of the present cycle have kept until now, for the status. None: none of them has
        looked for state, or there is no folder.

        Args:
            cycle: the present one.
            started_ns: when its ranks were started (monotonic nanoseconds).
        """
        kept = self._folder.state(started_ns)
        if kept is None or kept.reached is None:
            return None
        return self._saved(cycle, kept)

    def _saved(self, cycle: int, kept: NodeMemory) -> events.StatesSavedEvent:
        """Returns what was kept as the journal's event has it."""
        share = None
        if kept.share is not None:
            share = round(kept.share, 6)
        return events.StatesSavedEvent(
            cycle,
            newest=kept.newest,
            reached=kept.reached or 0,
            saves=kept.saves,
            failed=kept.failed,
            size=kept.size,
            cost_s=round(kept.cost_s, 6),
            first_cost_s=round(kept.first_cost_s, 6),
            share=share,
            in_use=kept.in_use,
            limit=kept.limit,
            copied=self.copied,
        )


def steps_lost(message: StateLoaded, reached: int) -> int | None:
    """Returns how many steps are computed again after a look for state in memory; None: nobody knows.

    It is not known where no rank had reported a step, nor where the program goes on without state in memory and names
    no checkpoint on disk: it may have one all the same.

    Args:
        message: what the ranks found.
        reached: the last step that was reported before.
    """
    start = max(message.step, message.newer_than)
    if reached == 0 or start == 0:
        return None
    return max(0, reached - start)
