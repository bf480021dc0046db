"""Decisions of level 1 as the journal holds them: small, and read with care.

`test_recovery_level.py` replays each of its own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.agent.in_process.recovery_level import RecoveryLevels, RecoveryState
from ft_launcher.agent.in_process.recovery_record import decide_again, is_recorded, to_record
from ft_launcher.agent.in_process.recovery_steps import Died, Happened, LossNotified, Reported
from rank_monitor.contract.errors import ProtocolError
from tests.restart_reports import report

RANKS = 8


def recorded(*happened: Happened) -> list[dict[str, Any]]:
    """The records of what happens to eight ranks in the wrapped function, one every 10 ms."""
    levels = RecoveryLevels(RecoveryState.at_start(range(RANKS), True, {16, 17}))
    now, found = 1e5, list[dict[str, Any]]()
    for event in [*said("assigning", 0), *happened]:
        now += 0.01
        known = levels.known()
        steps = levels.on(event, now)
        if isinstance(steps, list) and is_recorded(event, known, steps):
            found.append(to_record(event, known, steps, now))
    return found


def said(phase: str, number: int, *but: int) -> list[Happened]:
    return [
        Reported(rank, report(phase, entry_rank=rank, round=number, limit_s=660.0))
        for rank in range(RANKS)
        if rank not in but
    ]


RESTART = [*said("recovering", 0), *said("running", 1)]
LOSS = [Died(3, -9), *said("recovering", 0, 3), *said("running", 1, 3), LossNotified(3, "")]


@pytest.mark.parametrize(("happened", "most"), [(RESTART, 800), (LOSS, 2000)], ids=["exception", "death"])
def test_a_restart_of_eight_ranks_takes_little_room(happened: list[Happened], most: int) -> None:
    records = recorded(*happened)
    assert records and sum(len(json.dumps(record)) for record in records) <= most


def test_deadlines_stand_once_for_ranks_that_are_alike() -> None:
    *_, record = recorded(*said("recovering", 0, 3), Died(3, -9))
    waiting, dead = record["known"]["wrappers"]
    assert waiting["local_ranks"] == [0, 1, 2, 4, 5, 6, 7] and dead["local_ranks"] == [3]
    assert waiting["due_s"] == [pytest.approx(660.0 - 0.01 * age) for age in range(7, 0, -1)] and "due_s" not in dead


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "kind": lambda record: record["happened"].update(what="another"),
    "field": lambda record: record["happened"].update(x=1),
    "rank": lambda record: record["happened"].update(local_rank=8),
    "code": lambda record: record["happened"].update(exit_code="1"),
    "none": lambda record: record.update(known=None),
    "ranks": lambda record: record["known"].update(ranks="ab"),
    "setting": lambda record: record["known"].pop("rejoin"),
    "iteration": lambda record: record["known"].update(since_s=1.0, failed=0.5),
    "time": lambda record: record["known"].update(since_s=10**400, failed=0),
    "slot": lambda record: record["known"]["wrappers"][0].update(local_ranks=[-1]),
    "message": lambda record: record["known"]["wrappers"][0].pop("limit_s"),
    "deadlines": lambda record: record["known"]["wrappers"][0].update(due_s=[1.0]),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=list(WRONG))
def test_what_does_not_fit(change: Callable[[dict[str, Any]], Any]) -> None:
    (record,) = recorded(Died(3, -9))
    assert decide_again(record["happened"], record["known"]) == record["follows"]
    change(record)
    with pytest.raises(ProtocolError):
        decide_again(record["happened"], record["known"])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from(["", "left", "died"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["what", "state"]), inner, max_size=2),
    max_leaves=4,
)
RECORDS = recorded(*LOSS)


@given(st.sampled_from(range(len(RECORDS))), st.data())
def test_any_record_leads_to_steps_or_does_not_fit(number: int, data: st.DataObject) -> None:
    record = copy.deepcopy(RECORDS[number])
    place: Any = record
    while True:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(keys))
        if not (isinstance(place[key], (dict, list)) and place[key] and data.draw(st.booleans())):
            break
        place = place[key]
    place[key] = data.draw(json_values)
    try:
        steps = decide_again(record["happened"], record["known"])
    except ProtocolError:
        return
    assert steps is None or all(step["step"] for step in steps)


WORDS = {
    "joining": ["joining"],
    "initialized": ["assigning", "arriving"],
    "handling_starting": ["recovering", "finalizing", "closing", "expelling"],
    "handling_completed": ["preparing", "running", "waiting"],
    "finalized": ["done"],
    "left": ["left"],
    "aborted": ["gave_up"],
}


@pytest.mark.parametrize(("state", "phase"), [(state, phase) for state, phases in WORDS.items() for phase in phases])
def test_the_journal_has_the_words_of_all_releases(state: str, phase: str) -> None:
    levels = RecoveryLevels(RecoveryState.at_start(range(1), True, set()))
    levels.on(Reported(0, report(phase, round=2, began_ns=5, is_timed=False)), 1.0)
    (wrapper,) = to_record(Died(0, 1), levels.known(), [], 1.0)["known"]["wrappers"]
    wrapper.pop("due_s", None)
    assert wrapper == {
        "local_ranks": [0],
        "state": state,
        "iteration": 2,
        "prefix": "in_process/0",
        "limit_s": 30.0,
    }
