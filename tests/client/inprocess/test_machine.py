"""Every phase with every event: what is listed happens, and nothing else but leaving."""

from __future__ import annotations

import pytest

from ft_client.inprocess.machine import ENDS, STEPS, Action, Event, Phase, step

GOING = [phase for phase in Phase if phase not in ENDS]


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name)
@pytest.mark.parametrize("event", Event, ids=lambda event: event.name)
def test_every_event_in_every_phase(phase: Phase, event: Event) -> None:
    after, actions = step(phase, event)
    if phase in ENDS:
        assert (after, actions) == (phase, ())
    elif (phase, event) in STEPS:
        assert (after, actions) == STEPS[phase, event]
    else:
        assert after is Phase.LEFT
        assert actions == ((Action.LEAVE,) if event is Event.LOST else (Action.DEPART,))


@pytest.mark.parametrize("phase", [phase for phase in GOING if phase is not Phase.ASSIGNING], ids=lambda one: one.name)
def test_a_fault_elsewhere_leads_to_recovery_from_wherever_a_rank_is_not_recovering_yet(phase: Phase) -> None:
    if phase in (Phase.RECOVERING, Phase.CLOSING, Phase.EXPELLING):
        return
    assert step(phase, Event.INTERRUPTED) == (Phase.RECOVERING, (Action.RECOVER,))


@pytest.mark.parametrize("phase", GOING, ids=lambda phase: phase.name)
def test_without_a_store_nobody_is_told(phase: Phase) -> None:
    assert step(phase, Event.LOST) == (Phase.LEFT, (Action.LEAVE,))


@pytest.mark.parametrize("phase", GOING, ids=lambda phase: phase.name)
def test_no_wait_has_no_next_step(phase: Phase) -> None:
    """Being late twice always ends a rank's part."""
    after, _ = step(phase, Event.LATE)
    again, _ = step(after, Event.LATE)
    assert Phase.LEFT in (after, again)


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.RUNNING], ids=lambda phase: phase.name)
def test_what_fails_before_or_in_the_function_restarts_and_what_ends_it_departs(phase: Phase) -> None:
    assert step(phase, Event.FAILED) == (Phase.RECOVERING, (Action.REPORT, Action.RECOVER))
    assert step(phase, Event.ENDED) == (Phase.LEFT, (Action.DEPART,))


def test_what_fails_after_a_fault_ends_this_rank() -> None:
    assert step(Phase.RECOVERING, Event.FAILED) == (Phase.LEFT, (Action.DEPART,))


def test_every_phase_but_the_first_can_be_reached() -> None:
    reached = {after for after, _ in STEPS.values()} | {Phase.ASSIGNING}
    assert reached == set(Phase)
