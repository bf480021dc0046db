"""Adds up what events say of the training's state in memory, and says it in a line and as JSON. Pure.

`node_status.py` keeps one `MemoryFacts`. While ranks run, `status_feed.py` brings what the node's folder has now, in
the form of the event `memory_saved`, which the journal gets once the cycle is over. So the status of a moment and the
journal's sum have the same figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ft_launcher.record.events import StateLoadedEvent, StatesSavedEvent
from rank_monitor.contract.memory_room import size_in_words

_MAX_TIERS = 8
"""Names of tiers that are counted apart; there are four. A rank cannot send others, but an event could have any."""
_KEYS = (
    *("tier", "step", "newer_than", "steps_lost", "refused"),
    *("newest", "reached", "behind", "copied", "share", "size", "in_use", "limit"),
)
"""Keys of `memory` that are null where nothing is known: of the last look for state, and of what is kept now."""


@dataclass(frozen=True)
class SaveCounts:
    """How many saves there were, how many failed, and for how long they have held up the training (seconds)."""

    count: int = 0
    failed: int = 0
    cost_s: float = 0.0


@dataclass(frozen=True)
class MemoryFacts:
    """What is known of state in memory.

    Attributes:
        loaded: the last look of the ranks for state; None: they never looked.
        saved: what the ranks of the present or the last cycle keep; None: nothing is known.
        is_over: whether `saved` is of a cycle that is over.
        before: the saves of all cycles that are over.
        loads: tier -> how often the training went on from it.
        refused: how many generations were not used.
        steps_lost: how many steps were lost in all.
    """

    loaded: StateLoadedEvent | None = None
    saved: StatesSavedEvent | None = None
    is_over: bool = False
    before: SaveCounts = field(default_factory=SaveCounts)
    loads: Mapping[str, int] = field(default_factory=dict)
    refused: int = 0
    steps_lost: int = 0

    def after(self, event: StateLoadedEvent | StatesSavedEvent) -> MemoryFacts:
        """Returns the facts after an event of the journal."""
        if isinstance(event, StatesSavedEvent):
            before = replace(
                self.before,
                count=self.before.count + event.saves,
                failed=self.before.failed + event.failed,
                cost_s=self.before.cost_s + event.cost_s,
            )
            return replace(self, saved=event, is_over=True, before=before)
        loads = dict(self.loads)
        if event.tier in loads or len(loads) < _MAX_TIERS:
            loads[event.tier] = loads.get(event.tier, 0) + 1
        return replace(
            self,
            loaded=event,
            loads=loads,
            refused=self.refused + len(event.refused),
            steps_lost=self.steps_lost + (event.steps_lost or 0),
        )

    def with_present(self, saved: StatesSavedEvent | None) -> MemoryFacts:
        """Returns the facts with what the ranks keep now. None: nothing is known of now, and nothing changes."""
        if saved is None:
            return self
        return replace(self, saved=saved, is_over=False)

    @property
    def saves(self) -> SaveCounts:
        """All saves until now."""
        if self.saved is None or self.is_over:
            return self.before
        now = self.saved
        return SaveCounts(
            self.before.count + now.saves, self.before.failed + now.failed, self.before.cost_s + now.cost_s
        )

    @property
    def behind(self) -> int | None:
        """How many steps were done since the newest step in memory: what a fault would cost now; None: none is there,
        or nothing is known."""
        if self.saved is None or self.saved.newest is None:
            return None
        return max(0, self.saved.reached - self.saved.newest)


def phrase(memory: MemoryFacts) -> str:
    """Returns the newest step in memory and its age in steps, for the sentence about the job; empty: none is there."""
    if memory.saved is None or memory.saved.newest is None:
        return ""
    text = f"step {memory.saved.newest:,} in memory"
    if memory.behind:
        text += f" ({memory.behind:,} behind)"
    return text


def as_json(memory: MemoryFacts) -> dict[str, Any] | None:
    """Returns `memory` of `/status.json`; None: the training has not looked for state in memory."""
    loaded, saved = memory.loaded, memory.saved
    if loaded is None and saved is None:
        return None
    found: dict[str, Any] = dict.fromkeys(_KEYS)
    if loaded is not None:
        found |= {
            "tier": loaded.tier,
            "step": loaded.step,
            "newer_than": loaded.newer_than,
            "steps_lost": loaded.steps_lost,
            "refused": len(loaded.refused),
        }
    if saved is not None:
        found |= {
            "newest": saved.newest,
            "reached": saved.reached,
            "behind": memory.behind,
            "copied": saved.copied,
            "share": saved.share,
            "size": saved.size,
            "in_use": saved.in_use,
            "limit": saved.limit,
        }
    saves = memory.saves
    return found | {
        "saves": saves.count,
        "failed": saves.failed,
        "cost_s": round(saves.cost_s, 3),
        "steps_lost_total": memory.steps_lost,
    }


def line_of(found: Mapping[str, Any]) -> str:
    """Returns what is known of state in memory, in a line for a terminal.

    Example: `in memory: step 79 (1 behind); went on from step 21, 24 steps lost; 30 saves took 0.9% of the time; 280.0
    KiB of 6.2 GiB`.

    Args:
        found: `memory` of `/status.json`, of any release.
    """
    parts = ["no step yet"]
    if found.get("newest") is not None:
        parts = [f"step {found['newest']:,}"]
        if found.get("behind"):
            parts[0] += f" ({found['behind']:,} behind)"
    if found.get("copied") is not None:
        parts.append(f"step {found['copied']:,} on other nodes, too")
    if found.get("step"):
        start, lost = f"went on from step {found['step']:,}", found["steps_lost"]
        if lost is not None:
            start += f", {lost:,} step{'' if lost == 1 else 's'} lost"
        parts.append(start)
    elif found.get("steps_lost"):
        parts.append(f"no state was used, {found['steps_lost']:,} steps lost")
    count = found.get("saves", 0)
    text = f"{count:,} save{'' if count == 1 else 's'}"
    if found.get("share") is not None:
        text += f" took {found['share']:.1%} of the time"
    if found.get("failed"):
        text += f", {found['failed']:,} failed"
    parts.append(text)
    if found.get("in_use") is not None:
        parts.append(f"{size_in_words(found['in_use'])} of {size_in_words(found['limit'])}")
    return f"in memory: {'; '.join(parts)}"
