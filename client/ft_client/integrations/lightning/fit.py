"""What follows from the facts of one `fit`. Pure.

Is the training complete; which limits may be learned; which section is open, one at a time, or none:

    began -> setup --step--> step --step_over--> (none) --step--> step ...
                   \\-------- save, from anywhere -------> checkpointing --saved--> (none)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ft_client.rank.monitoring.learned_limits import OUT_OF_SECTION, STEP

SETUP, CHECKPOINTING, WARMUP = "setup", "checkpointing", "warmup"
LEARNABLE = (SETUP, STEP, CHECKPOINTING, OUT_OF_SECTION)

_BATCHES_FOR_HEARTBEATS = 2
"""Two, so that there was an interval between batches."""
_BATCHES_FOR_STEPS = 16
"""As in Megatron-LM's integration (`_MIN_ITERS_FOR_STEP_TIMEOUT_UPDATE`): the first steps take longer than others."""
_BATCHES_OF_NOTHING_LEFT = 1
"""A job that finds nothing to do runs one batch at most."""
_ENDLESS = -1
"""Lightning's word for no limit, in `max_steps` and `max_epochs`."""


@dataclass
class Fit:
    """What has happened since `fit` began in this process, as the callbacks count it."""

    batches: int = 0
    loaded: bool = False
    saved: bool = False
    ended: bool = False
    """Whether Lightning reached the end of `fit`, by itself or because it was asked to stop."""

    def teaches_heartbeats(self) -> bool:
        """Whether the longest intervals were seen: only loading and saving a checkpoint shows them."""
        return self.batches >= _BATCHES_FOR_HEARTBEATS and self.loaded and self.saved

    def teaches_sections(self, final: bool, saves_later: bool) -> list[str]:
        """The sections of `LEARNABLE` whose limits may be learned from this fit.

        Args:
            final: the fit is over.
            saves_later: checkpoints are written in the background, so the duration of a save is not meaningful.
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
    """The position of a trainer and its limits. A maximum of -1 or None is not a limit.

    `time_is_up` is of a timer that goes on counting in the next job: one that begins anew limits only this job.
    """

    step: int
    max_steps: int
    epoch: int
    max_epochs: int | None
    asked_to_stop: bool
    at_end_of_epoch: bool
    early_stopped: bool
    time_is_up: bool


def why_complete(fit: Fit, now: TrainerProgress) -> str | None:
    """The reason why no further job is needed; None if the training is not complete. For a fit that did not fail.

    Lightning counts an epoch in which the training was asked to stop as a complete one.
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
    """The section that is open after the event, given the one that was."""
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
