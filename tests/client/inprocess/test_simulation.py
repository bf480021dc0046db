"""Random schedules of faults, deaths, respawns and store operations: no deadlock, and all agree on who is who.

`FT_SIMULATION_SEEDS=20000 pytest tests/client/inprocess/test_simulation.py` is the long run.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from ft_client.inprocess.exception import InternalError
from rank_monitor.contract.rounds.round import Round
from tests.client.inprocess.simulation import Plan, SimulatedCall, Violation, play, script_of, shrink

SEEDS = int(os.environ.get("FT_SIMULATION_SEEDS", "1200"))
AT_ONCE = 100


def plan_of(seed: int) -> Plan:
    source = random.Random(seed)
    plan = Plan(source.randint(1, 6), source.randint(0, 5), source.randint(0, 4), source.randint(0, 3))
    active = source.randint(1, plan.ranks) if seed % 3 == 1 else None
    return replace(plan, active=active, impatient=seed % 4 == 2, gathers=seed % 5 // 3 * (1 + seed % 2))


def story(plan: Plan, script: list[int]) -> str:
    """What happens, line by line."""
    call = SimulatedCall(plan, script)
    try:
        call.run()
    except Exception as error:
        call.stage.lines.append(f"{type(error).__name__}: {error}")
    return "\n".join(call.stage.lines)


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_every_schedule_ends_well(first: int) -> None:
    for seed in range(first, min(first + AT_ONCE, SEEDS)):
        plan, script = plan_of(seed), script_of(seed)
        try:
            play(plan, script)
        except Exception as error:
            shortest = shrink(plan, script)
            pytest.fail(f"seed {seed}, {plan}: {error}\n{story(plan, shortest)}\nscript: {shortest}")


def test_without_faults_nothing_is_restarted() -> None:
    call = play(Plan(4, 0, 0, 0), script_of(1))
    assert set(call.sizes) == {0}
    assert len(call.ends) == 4


def test_the_schedules_reach_what_they_are_for() -> None:
    """Several rounds, deaths at many places, members that came back."""
    iterations, deaths, joined, abandoned = 0, 0, 0, 0
    for seed in range(300):
        call = play(plan_of(seed), script_of(seed))
        iterations = max(iterations, *call.sizes, 0)
        deaths += len(call.killed)
        abandoned += call.abandoned
        joined += sum(name.endswith("'") for name in call.started)
    assert iterations >= 4
    assert deaths > 100
    assert joined > 20
    assert abandoned > 20


def test_a_broken_protocol_is_found_and_told_in_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: nobody speaks for the dead, and nobody misses them."""
    monkeypatch.setattr("tests.client.inprocess.simulation.depart", lambda *given: None)
    monkeypatch.setattr(Round, "missing", lambda *given: [])
    for seed in range(200):
        plan, script = plan_of(seed), script_of(seed)
        try:
            play(plan, script)
        except Exception:
            shortest = shrink(plan, script)
            assert len(shortest) < len(script) / 4
            assert "killed" in story(plan, shortest)
            return
    pytest.fail("not found")


def test_who_was_slow_for_too_long_would_go_on_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: what was released is deleted as well, so that it can be released anew."""
    delete_keys = Round.delete_keys

    def delete_all(iteration: Round) -> None:
        delete_keys(iteration)
        for key in (iteration.store_address, iteration.started, iteration.outcome, iteration.closed):
            iteration._store.delete_key(key)

    monkeypatch.setattr(Round, "delete_keys", delete_all)
    with pytest.raises((Violation, InternalError)):
        for seed in range(2, 20_000, 4):
            play(plan_of(seed), script_of(seed))


def test_no_keys_gather_in_the_store() -> None:
    """Of each restart four short keys are left: those by which ranks were released, and the note."""

    def left(failures: int) -> int:
        return len(play(Plan(3, failures, 0, 0), [1] * 20_000).store.values)

    assert left(450) <= left(350) + 4 * 100 + 2 * 3  # and records of the last fault
