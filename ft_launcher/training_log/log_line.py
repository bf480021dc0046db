"""`LogLine`: what one printed line says of the training, and how its numbers are read. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from rank_monitor.contract.wire.messages import NO_ITERATION

# 18 digits always fit into 64 bits; the longest exact form of a float has 24 characters.
_MOST_DIGITS, _MOST_CHARACTERS = 18, 32
_MOST_STEP_S = 1e6
"""Eleven days: more is no time of a step."""


@dataclass(frozen=True)
class LogLine:
    """What a line says. All that it does not say has its default.

    `iteration`: the step, counted through the whole training. `steps`: how many were done since the line before.
    `step_s`: how long one takes. `is_complete`: what it counts is complete, so no further step is expected for now.
    """

    iteration: int = NO_ITERATION
    steps: int = 0
    step_s: float = 0.0
    loss: float | None = None
    is_complete: bool = False


Reader: TypeAlias = Callable[[str], LogLine | None]
"""Reads one line; returns None for one that says nothing of the training."""


def whole_number(text: str | None) -> int:
    """Returns the number in a text, NO_ITERATION when it is none."""
    if text is None or not text.isdecimal() or len(text) > _MOST_DIGITS:
        return NO_ITERATION
    return int(text)


def number(text: str | None) -> float | None:
    """Returns the number in a text, which may be nan or inf; None when it is none."""
    if text is None or len(text) > _MOST_CHARACTERS:
        return None
    try:
        return float(text.strip(" ,;:'\""))
    except ValueError:
        return None


def seconds(text: str | None, unit_s: float = 1.0) -> float:
    """Returns a time of a step in seconds, 0 when the text is none."""
    found = number(text)
    if found is None or not math.isfinite(found) or not 0 < found * unit_s < _MOST_STEP_S:
        return 0.0
    return found * unit_s
