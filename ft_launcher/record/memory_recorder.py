"""Records what becomes of the training's state in memory: events of the journal, lines on the console.

`agent/state_in_memory.py` calls it in the agent's thread, `job_memory.py` at the start. Recording decides nothing and
must never end a training.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ft_launcher.record import events
from ft_launcher.record.console import console_text
from ft_launcher.record.journal.contained import contained
from ft_launcher.record.logs.logs import KeptFiles
from rank_monitor.contract.copy_records import CopyNews
from rank_monitor.contract.flush_order import FlushResult
from rank_monitor.contract.memory_room import size_in_words

logger = logging.getLogger(__name__)


class MemoryRecorder:
    """Records the events of state in memory, one method for each; `Recorder.memory` is the only one."""

    def __init__(self, files: KeptFiles) -> None:
        self._journal = files.journal

    def found(self, step: int | None, reason: str, left: Mapping[str, Any]) -> None:
        """Records what a killed launcher of this job left in the memory of this node.

        Args:
            step: the newest complete step, which is taken over; None: nothing is.
            reason: why.
            left: what this was decided by.
        """
        if step is not None:
            console_text.say(f"takes over the state in memory of an earlier start: step {step}; {reason}")
        elif left["steps"]:
            console_text.say(
                f"the state in memory of an earlier start, step {max(left['steps'])}, is removed: {reason}"
            )
        self._journal.write(events.StateFoundEvent(step, reason, left))

    def no_folder(self, reason: str, is_wanted: bool) -> None:
        """Records that there is no folder for the training's state in memory.

        Args:
            reason: why, and what to do.
            is_wanted: the user has given an option for it. Else the ranks say it where the training asks for it.
        """
        if is_wanted:
            logger.warning("no state is kept in memory: %s", reason)
        self._journal.write(events.NoStateInMemoryEvent(reason))

    @contained("an event cannot be recorded")
    def loaded(self, loaded: events.StateLoadedEvent, is_shown: bool) -> None:
        """Records where the training goes on from.

        Args:
            is_shown: whether this node tells the user: one of the job does.
        """
        # `report` and not `write`: ranks choose the contents.
        self._journal.report(loaded)
        line = console_text.goes_on(loaded.tier, loaded.step, loaded.newer_than, loaded.reached, loaded.steps_lost)
        if is_shown and line:
            console_text.say(line)

    @contained("an event cannot be recorded")
    def brought_back(self, found: FlushResult) -> None:
        """Records what an earlier start had written to shared storage, and what became of it: of the newest state."""
        if found.step is not None:
            size, age = size_in_words(found.size), f"{found.age_s:.0f} s ago on {found.host}"
            console_text.say(f"takes over step {found.step} ({size}) from --ft-memory-flush, written {age}")
            if found.reason:
                logger.warning("no newer state is taken over from --ft-memory-flush: %s", found.reason)
        elif found.reason:
            logger.warning("no state is taken over from --ft-memory-flush: %s", found.reason)
        else:
            return
        age_s, host = round(found.age_s, 3), found.host
        self._journal.write(events.StateBroughtBackEvent(found.step, found.size, found.reason, age_s, host))

    @contained("an event cannot be recorded")
    def fetched(self, cycle: int, news: CopyNews) -> None:
        """Records what became of a state that this node fetched from another one."""
        if news.step is None:
            logger.warning("the state in memory that this node lacks was not fetched: %s", news.reason)
        elif news.peer:
            size = size_in_words(news.size)
            console_text.say(f"fetched step {news.step} ({size}) from the memory of {news.peer} in {news.took_s:.1f} s")
        else:
            console_text.say(f"takes over the copy of step {news.step} ({size_in_words(news.size)}) that was here")
        took_s = round(news.took_s, 3)
        self._journal.write(events.StateFetchedEvent(cycle, news.step, news.size, took_s, news.peer, news.reason))

    @contained("an event cannot be recorded")
    def not_copied(self, cycle: int, step: int | None, peer: str, reason: str) -> None:
        """Records that a state could not be copied to another node, and why."""
        what, where = "no state", "other nodes"
        if step is not None:
            what = f"step {step}"
        if peer:
            where = peer
        logger.warning("%s in memory is not copied to %s: %s", what, where, reason)
        self._journal.write(events.StateNotCopiedEvent(cycle, step, peer, reason))

    @contained("an event cannot be recorded")
    def copied(self, copied: events.StatesCopiedEvent) -> None:
        """Records what was copied to another node in a cycle that is over."""
        self._journal.write(copied)

    @contained("an event cannot be recorded")
    def flushed(self, step: int, size: int, took_s: float) -> None:
        """Records that the newest state of this node was written to shared storage. `took_s`: seconds."""
        console_text.say(f"step {step} ({size_in_words(size)}) was written to --ft-memory-flush in {took_s:.1f} s")
        self._journal.write(events.StateFlushedEvent(step, size, round(took_s, 3), ""))

    @contained("an event cannot be recorded")
    def not_flushed(self, reason: str) -> None:
        """Records that no state of this node was written to shared storage, and why."""
        logger.warning("no state is written to --ft-memory-flush: %s", reason)
        self._journal.write(events.StateFlushedEvent(None, 0, 0.0, reason))

    @contained("an event cannot be recorded")
    def saved(self, saved: events.StatesSavedEvent) -> None:
        """Records what the ranks of this node have kept in a cycle that is over."""
        self._journal.write(saved)
