"""What follows from the facts of one `fit`. Pure.

`watched_fit.py` and `callbacks.py` count what Lightning's hooks report, and ask here three questions:

- Is the training complete, so that no further job is needed? (`completion_reason`)
- Which limits may be learned from this `fit`? (`Fit.teaches_heartbeats`, `Fit.teaches_sections`)
- Which section is open now? At most one is at a time (`section_after`):

    began -> setup --step--> step --step_over--> (none) --step--> step ...
                   \\-------- save, from anywhere -------> checkpointing --saved--> (none)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ft_client.rank.monitoring.learned_limits import OUT_OF_SECTION, STEP

SETUP, CHECKPOINTING, WARMUP = "setup", "checkpointing", "warmup"
"""Sections of a `fit`. WARMUP is the first batches of an evaluation, which a learned limit of STEP must not judge."""
LEARNABLE = (SETUP, STEP, CHECKPOINTING, OUT_OF_SECTION)
"""The sections whose limits may be learned; OUT_OF_SECTION is the time in which no section is open."""

_BATCHES_FOR_HEARTBEATS = 2
"""Batches before intervals of heartbeats are learned: two, so that there was an interval between batches."""
_BATCHES_FOR_STEPS = 16
"""As in Megatron-LM's integration (`_MIN_ITERS_FOR_STEP_TIMEOUT_UPDATE`): the first steps take longer than others."""
_BATCHES_OF_NOTHING_LEFT = 1
"""A job that finds nothing to do runs one batch at most."""
_ENDLESS = -1
"""Lightning's word for no limit, in `max_steps` and `max_epochs`."""


@dataclass
class Fit:
    """What has happened since `fit` began in this process, as the callbacks count it.

    Attributes:
        batches: how many batches of training have ended.
        loaded: whether a checkpoint was loaded.
        saved: whether a checkpoint was saved.
        ended: whether Lightning reached the end of `fit`, by itself or because it was asked to stop.
    """

    batches: int = 0
    loaded: bool = False
    saved: bool = False
    ended: bool = False

    def teaches_heartbeats(self) -> bool:
        """Returns whether the longest intervals were seen: only loading and saving a checkpoint shows them."""
        return self.batches >= _BATCHES_FOR_HEARTBEATS and self.loaded and self.saved

    def teaches_sections(self, final: bool, saves_later: bool) -> list[str]:
        """Returns the sections of `LEARNABLE` whose limits may be learned from this `fit`.

        Args:
            final: whether `fit` is over.
            saves_later: whether checkpoints are written in the background: then the duration of a save means nothing.
        """
        seen = {
            SETUP: self.loaded,
            STEP: self.batches > _BATCHES_FOR_STEPS,
            CHECKPOINTING: self.saved and not saves_later,
        }
        seen[OUT_OF_SECTION] = final and seen[SETUP] and seen[STEP] and self.saved
        return [name for name in LEARNABLE if seen[name]]


@dataclass(frozen=True)
class TrainerProgress:
    """The position of a trainer and its limits, at the end of `fit`. A maximum of -1 or None is no limit.

    Attributes:
        step, max_steps: optimizer steps over all jobs of the training.
        epoch, max_epochs: complete epochs.
        asked_to_stop: whether a callback or a signal has asked Lightning to end `fit`.
        at_end_of_epoch: whether the last batch was the last of its epoch.
        early_stopped: whether a callback found that further training does not help.
        time_is_up: whether the time of a timer has passed that goes on counting in the next job. A timer that begins
            anew limits only this job.
    """

    step: int
    max_steps: int
    epoch: int
    max_epochs: int | None
    asked_to_stop: bool
    at_end_of_epoch: bool
    early_stopped: bool
    time_is_up: bool


def completion_reason(fit: Fit, now: TrainerProgress) -> str | None:
    """Returns why no further job is needed; None if the training is not complete. For a `fit` that did not fail.

    Lightning counts an epoch in which the training was asked to stop as a complete one, so the number of epochs counts
    only where `fit` was not cut off in the middle of one.
    """
    if now.max_steps != _ENDLESS and now.step >= now.max_steps:
        return f"step {now.step} of {now.max_steps}"
    cut = now.asked_to_stop and not now.at_end_of_epoch
    if now.max_epochs not in (None, _ENDLESS) and now.epoch >= now.max_epochs and not cut:
        return f"epoch {now.epoch} of {now.max_epochs}"
    if now.asked_to_stop and now.early_stopped:
        return f"stopped early after step {now.step}"
    if now.asked_to_stop and now.time_is_up:
        return f"its time was up after step {now.step}"
    if fit.ended and fit.batches <= _BATCHES_OF_NOTHING_LEFT and not now.asked_to_stop:
        return f"nothing left to do after step {now.step}"
    return None


class FitEvent(Enum):
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


def section_after(now: str | None, event: FitEvent) -> str | None:
    """Returns the section that is open after the event; None: none.

    Args:
        now: the section that was open before; None: none.
        event: what Lightning's hook reported.
    """
    match event:
        case FitEvent.BEGAN:
            return SETUP
        case FitEvent.STEP:
            return STEP
        case FitEvent.EARLY_EVALUATION:
            return WARMUP
        case FitEvent.STEP_OVER:
            if now in (STEP, WARMUP):
                return None
            return now
        case FitEvent.SAVE:
            return CHECKPOINTING
        case FitEvent.SAVED:
            if now == CHECKPOINTING:
                return None
            return now
        case FitEvent.OVER:
            return None
