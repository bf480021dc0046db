"""How each category of time looks, in the report, its picture, and on the page of a running job. Pure.

The page has these values in its own files (`tools/status/page/`), which a test compares with this one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ft_launcher.record.ledger.account import CUSTOM, Category

LIGHT = {
    "good": "#2e7d4f",
    "bad": "#b83a26",
    "late": "#b7791f",
    "idle": "#7b838d",
    "start": "#3f6ca8",
    "save": "#7d55a5",
}
"""Hue -> colour on a light ground."""
DARK = {
    "good": "#4fae77",
    "bad": "#ef6a55",
    "late": "#dda63a",
    "idle": "#8b939d",
    "start": "#7ba4dc",
    "save": "#b58be0",
}
"""The same on a dark one."""
WEAK = 0.65
"""Opacity of what is drawn weakly."""


@dataclass(frozen=True)
class Look:
    """A hue, drawn weakly or with slanted lines where another category has it too."""

    hue: str
    is_weak: bool = False
    is_slanted: bool = False

    @property
    def classes(self) -> str:
        """Names of classes of a style sheet."""
        return " ".join([self.hue, *["weak"] * self.is_weak, *["slanted"] * self.is_slanted])


_OTHER = Look("start", is_slanted=True)
LOOKS: dict[str, Look] = {
    Category.RESCHEDULE: Look("late", is_slanted=True),
    Category.BACKOFF: Look("late", is_slanted=True),
    Category.HEALTH: Look("late", is_weak=True),
    Category.RENDEZVOUS: Look("start"),
    Category.MEMBERSHIP: Look("late", is_weak=True),
    Category.LAUNCH: Look("start"),
    Category.SETUP: Look("start"),
    Category.CHECKPOINT_LOAD: Look("save", is_weak=True),
    Category.WARMUP: Look("start"),
    Category.DATA: Look("start", is_weak=True),
    Category.STEP: Look("good"),
    Category.EVALUATION: _OTHER,
    CUSTOM: _OTHER,
    Category.CHECKPOINT_SAVE: Look("save"),
    Category.LOST_PROGRESS: Look("bad", is_slanted=True),
    Category.EXCLUDED: Look("idle", is_weak=True),
    Category.UNKNOWN: Look("idle"),
    Category.DETECTION: Look("late"),
    Category.STOP: Look("late", is_weak=True),
}
"""Category -> look, in the order in which a cycle comes to them. Other sections have that of CUSTOM."""


def look_of(category: str) -> Look:
    """Returns the look of a category."""
    return LOOKS.get(category, _OTHER)
