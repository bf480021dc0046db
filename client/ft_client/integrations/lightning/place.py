"""Decides which section a `fit` is in: one at a time, or none. Pure.

began -> setup --step--> step --step_over--> (none) --step--> step ...
               \\-------- save, from anywhere -------> checkpointing --saved--> (none)
"""

from __future__ import annotations

from enum import Enum, auto

from ft_client.integrations.lightning.fit import CHECKPOINTING, SETUP
from ft_client.monitoring.learned_limits import STEP

WARMUP = "warmup"


class Event(Enum):
    """The events that Lightning's hooks report."""

    BEGAN = auto()
    STEP = auto()
    """A batch of training or evaluation begins."""
    EARLY_EVALUATION = auto()
    """One of the first batches of evaluation begins: a learned limit of steps does not judge it."""
    STEP_OVER = auto()
    SAVE = auto()
    """A checkpoint is written, removed, or what is still being written is waited for."""
    SAVED = auto()
    OVER = auto()


def section_after(now: str | None, event: Event) -> str | None:
    """The section that is open after the event, given the one that was."""
    match event:
        case Event.BEGAN:
            return SETUP
        case Event.STEP:
            return STEP
        case Event.EARLY_EVALUATION:
            return WARMUP
        case Event.STEP_OVER:
            if now in (STEP, WARMUP):
                return None
            return now
        case Event.SAVE:
            return CHECKPOINTING
        case Event.SAVED:
            if now == CHECKPOINTING:
                return None
            return now
        case Event.OVER:
            return None
