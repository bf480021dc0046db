"""The colours of the categories of time: in the report, in its picture, and on the page of a running job. Pure.

A category has a hue, by what it means for the user: good (steps), bad (lost progress), late (a fault), start, save,
idle. Categories of one hue differ by weakness or by slanted lines. `tools/report/page.py` and `picture.py` draw with
these values. The page of a running job cannot import them: `tools/status/page/` has the same values again, and a test
compares both.
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
"""Hue -> colour on a light background."""
DARK = {
    "good": "#4fae77",
    "bad": "#ef6a55",
    "late": "#dda63a",
    "idle": "#8b939d",
    "start": "#7ba4dc",
    "save": "#b58be0",
}
"""Hue -> colour on a dark background."""
WEAK = 0.65
"""Opacity of a category that is drawn weakly."""


@dataclass(frozen=True)
class Look:
    """How a category is drawn.

    Attributes:
        hue: a key of `LIGHT` and `DARK`.
        is_weak, is_slanted: tell the category from others of the same hue.
    """

    hue: str
    is_weak: bool = False
    is_slanted: bool = False

    @property
    def classes(self) -> str:
        """The names of the CSS classes of this look, separated by blanks."""
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
"""Category -> look, in the order in which a cycle goes through the categories. The page draws the bar of a cycle in
this order. Any other name, of a section or of a category without an entry, has the look of CUSTOM."""


def look_of(category: str) -> Look:
    """Returns the look of a category."""
    return LOOKS.get(category, _OTHER)
