"""The categories of a job's time, and which section belongs to which. Pure. docs/operations.md explains each."""

from __future__ import annotations

from enum import Enum

from rank_monitor.contract.wire.rank_times import SAVE_SECTIONS, STEP


class Category(str, Enum):
    """A category of time. Beside these there is one for each other section: `custom:NAME`."""

    __hash__ = str.__hash__
    __str__ = str.__str__

    STEP = "step"
    LOST_PROGRESS = "lost_progress"
    CHECKPOINT_SAVE = "checkpoint_save"
    CHECKPOINT_LOAD = "checkpoint_load"
    DATA = "data"
    EVALUATION = "evaluation"
    LAUNCH = "launch"
    RENDEZVOUS = "rendezvous"
    SETUP = "setup"
    WARMUP = "warmup"
    DETECTION = "detection"
    STOP = "stop"
    HEALTH = "health"
    BACKOFF = "backoff"
    RESCHEDULE = "reschedule"
    MEMBERSHIP = "membership"
    EXCLUDED = "excluded"
    UNKNOWN = "unknown"


CUSTOM = "custom:"
_MOST_CUSTOM = 64
"""Categories of sections with names of their own in one account: as many as one rank's ledger tells apart."""
_REST = f"{CUSTOM}(others)"

_OF_SECTION = {
    STEP: Category.STEP,
    **dict.fromkeys(SAVE_SECTIONS, Category.CHECKPOINT_SAVE),
    **dict.fromkeys(("checkpoint_load", "load_checkpoint", "restore"), Category.CHECKPOINT_LOAD),
    **dict.fromkeys(("data", "dataloader", "data_loading"), Category.DATA),
    **dict.fromkeys(("evaluation", "eval", "validation"), Category.EVALUATION),
    **dict.fromkeys(("setup", "init", "initialization"), Category.SETUP),
}


def category_of(section: str) -> str:
    """Returns the category of a section's time."""
    return _OF_SECTION.get(section, CUSTOM + section)


def add(seconds: dict[str, float], category: str, spent_s: float) -> None:
    """Adds time to a category. Sections that are too many share one, so that an account stays small."""
    if category not in seconds and category.startswith(CUSTOM):
        own = sum(name.startswith(CUSTOM) for name in seconds)
        if own >= _MOST_CUSTOM:
            category = _REST
    seconds[str(category)] = seconds.get(category, 0.0) + spent_s
