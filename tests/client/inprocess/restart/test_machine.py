"""Every phase with every event: what is listed happens, and nothing else but leaving."""

from __future__ import annotations

import pytest

from ft_client.inprocess.restart.machine import ENDS, STEPS, RestartAction, RestartEvent, step
from rank_monitor.contract.restart_phase import RESTARTING, RestartPhase

PHASES = [phase for phase in RestartPhase if phase in ENDS or any(phase is of for of, _ in STEPS)]
"""Of the machine: some are only reported."""
GOING = [phase for phase in PHASES if phase not in ENDS]


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
@pytest.mark.parametrize("event", RestartEvent, ids=lambda event: event.name)
def test_every_event_in_every_phase(phase: RestartPhase, event: RestartEvent) -> None:
    after, actions = step(phase, event)
    if phase in ENDS:
        assert (after, actions) == (phase, ())
    elif (phase, event) in STEPS:
        assert (after, actions) == STEPS[phase, event]
    else:
        assert after is RestartPhase.LEFT
        assert actions == ((RestartAction.LEAVE,) if event is RestartEvent.LOST else (RestartAction.DEPART,))


@pytest.mark.parametrize(
    "phase", [phase for phase in GOING if phase is not RestartPhase.ASSIGNING], ids=lambda one: one.name
)
def test_a_fault_elsewhere_leads_to_recovery_from_wherever_a_rank_is_not_recovering_yet(phase: RestartPhase) -> None:
    if phase in RESTARTING:
        return
    assert step(phase, RestartEvent.INTERRUPTED) == (RestartPhase.RECOVERING, (RestartAction.AWAIT_ABORT,))


@pytest.mark.parametrize("phase", GOING, ids=lambda phase: phase.name)
def test_without_a_store_nobody_is_told(phase: RestartPhase) -> None:
    assert step(phase, RestartEvent.LOST) == (RestartPhase.LEFT, (RestartAction.LEAVE,))


@pytest.mark.parametrize("phase", GOING, ids=lambda phase: phase.name)
def test_no_wait_has_no_next_step(phase: RestartPhase) -> None:
    """Being late twice always ends a rank's part."""
    after, _ = step(phase, RestartEvent.LATE)
    again, _ = step(after, RestartEvent.LATE)
    assert RestartPhase.LEFT in (after, again)


@pytest.mark.parametrize("phase", [RestartPhase.PREPARING, RestartPhase.RUNNING], ids=lambda phase: phase.name)
def test_what_fails_before_or_in_the_function_restarts_and_what_ends_it_departs(phase: RestartPhase) -> None:
    reported = RestartPhase.RECOVERING, (RestartAction.REPORT, RestartAction.AWAIT_ABORT)
    assert step(phase, RestartEvent.FAILED) == reported
    assert step(phase, RestartEvent.ENDED) == (RestartPhase.LEFT, (RestartAction.DEPART,))


def test_what_fails_after_a_fault_ends_this_rank() -> None:
    aborted = RestartPhase.FINALIZING, (RestartAction.FINALIZE,)
    assert step(RestartPhase.RECOVERING, RestartEvent.INTERRUPTED) == aborted
    assert step(RestartPhase.FINALIZING, RestartEvent.FAILED) == (RestartPhase.LEFT, (RestartAction.DEPART,))


def test_every_phase_but_the_first_can_be_reached() -> None:
    reached = {after for after, _ in STEPS.values()} | {RestartPhase.ASSIGNING}
    assert reached == set(PHASES)
