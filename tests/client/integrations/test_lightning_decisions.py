"""What follows from the facts of a `fit`, row by row: complete or not, what is learned, which section is open."""

from __future__ import annotations

import dataclasses

import pytest

from ft_client.integrations.lightning.fit import (
    CHECKPOINTING,
    LEARNABLE,
    SETUP,
    WARMUP,
    Fit,
    FitEvent,
    TrainerProgress,
    completion_reason,
    section_after,
)
from ft_client.rank.monitoring.learned_limits import OUT_OF_SECTION, STEP

MIDWAY = TrainerProgress(
    step=7,
    max_steps=-1,
    epoch=1,
    max_epochs=-1,
    asked_to_stop=False,
    at_end_of_epoch=False,
    early_stopped=False,
    time_is_up=False,
)


@pytest.mark.parametrize(
    ("reason", "facts", "batches"),
    [
        (None, {}, 7),
        ("step 7 of 7", {"max_steps": 7}, 7),
        ("step 7 of 5", {"max_steps": 5}, 0),
        (None, {"max_steps": 8}, 7),
        ("step 7 of 0", {"max_steps": 0}, 0),
        ("epoch 1 of 1", {"max_epochs": 1, "at_end_of_epoch": True}, 7),
        ("epoch 1 of 1", {"max_epochs": 1}, 0),
        (None, {"max_epochs": 2, "at_end_of_epoch": True}, 7),
        (None, {"max_epochs": None}, 7),
        # Asked to stop within the last epoch: Lightning counts it as done, the training is not.
        (None, {"max_epochs": 1, "asked_to_stop": True}, 7),
        ("epoch 1 of 1", {"max_epochs": 1, "asked_to_stop": True, "at_end_of_epoch": True}, 7),
        ("stopped early after step 7", {"asked_to_stop": True, "early_stopped": True}, 7),
        (None, {"early_stopped": True}, 7),
        ("its time was up after step 7", {"asked_to_stop": True, "time_is_up": True}, 7),
        (None, {"time_is_up": True}, 7),
        ("nothing left to do after step 7", {}, 0),
        (None, {"asked_to_stop": True}, 0),
    ],
)
def test_when_a_training_is_complete(reason: str | None, facts: dict[str, object], batches: int) -> None:
    fit = Fit(batches=batches, ended=True)
    assert completion_reason(fit, dataclasses.replace(MIDWAY, **facts)) == reason  # type: ignore[arg-type]


def test_a_fit_that_did_not_come_to_its_end_did_not_find_nothing_to_do() -> None:
    assert completion_reason(Fit(batches=0, ended=False), MIDWAY) is None


@pytest.mark.parametrize(
    ("teaches", "fit"),
    [
        (True, Fit(batches=2, loaded=True, saved=True)),
        (False, Fit(batches=1, loaded=True, saved=True)),
        (False, Fit(batches=9, loaded=False, saved=True)),
        (False, Fit(batches=9, loaded=True, saved=False)),
    ],
)
def test_when_heartbeats_are_learned(teaches: bool, fit: Fit) -> None:
    assert fit.teaches_heartbeats() is teaches


@pytest.mark.parametrize(
    ("learned", "fit", "final", "saves_later"),
    [
        ([], Fit(batches=16), True, False),
        ([STEP], Fit(batches=17), True, False),
        ([STEP, CHECKPOINTING], Fit(batches=17, saved=True), True, False),
        ([SETUP, STEP, CHECKPOINTING], Fit(batches=17, saved=True, loaded=True), False, False),
        ([*LEARNABLE], Fit(batches=17, saved=True, loaded=True), True, False),
        ([SETUP, STEP, OUT_OF_SECTION], Fit(batches=17, saved=True, loaded=True), True, True),
        ([SETUP, CHECKPOINTING], Fit(batches=16, saved=True, loaded=True), True, False),
        ([SETUP, STEP], Fit(batches=17, loaded=True), True, False),
    ],
)
def test_which_sections_are_learned(learned: list[str], fit: Fit, final: bool, saves_later: bool) -> None:
    assert fit.teaches_sections(final, saves_later) == learned


SECTIONS = (None, SETUP, STEP, WARMUP, CHECKPOINTING)
AFTER = {
    FitEvent.BEGAN: (SETUP,) * 5,
    FitEvent.STEP: (STEP,) * 5,
    FitEvent.EARLY_EVALUATION: (WARMUP,) * 5,
    FitEvent.STEP_OVER: (None, SETUP, None, None, CHECKPOINTING),
    FitEvent.SAVE: (CHECKPOINTING,) * 5,
    FitEvent.SAVED: (None, SETUP, STEP, WARMUP, None),
    FitEvent.OVER: (None,) * 5,
}


@pytest.mark.parametrize("event", FitEvent)
def test_each_event_leads_somewhere_from_each_section(event: FitEvent) -> None:
    assert tuple(section_after(now, event) for now in SECTIONS) == AFTER[event]
