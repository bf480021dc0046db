"""What is remembered of failed runs: progress, errors in a row; and its way through JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.restart_history import EndedRun, History
from rank_monitor.contract.wire.messages import NO_ITERATION

CHARGED = (1.0, 2.0)
BAD = EndedRun("ValueError at train.py:7", "one", compares_text=True)


def after(history: History, *iterations: int | None, least: int = 1) -> History:
    """The history after runs that came to these iterations."""
    for iteration in iterations:
        history = history.ended(EndedRun(reached=iteration), least)
    return history


@pytest.mark.parametrize(
    ("mark", "least", "reached", "expected"),
    [
        (None, 1, NO_ITERATION, (None, 1, CHARGED)),
        (None, 1, None, (None, 1, CHARGED)),
        (None, 1, 0, (0, 0, ())),
        (None, 1, 7, (7, 0, ())),
        (7, 1, 8, (8, 0, ())),
        (7, 1, 7, (7, 2, CHARGED)),
        (7, 1, 3, (7, 2, CHARGED)),
        (7, 1, NO_ITERATION, (7, 2, CHARGED)),
        (7, 1, None, (7, 1, CHARGED)),
        (7, 10, 16, (7, 2, CHARGED)),
        (7, 10, 17, (17, 0, ())),
        (7, 0, 7, (7, 2, CHARGED)),
    ],
)
def test_progress(mark: int | None, least: int, reached: int | None, expected: tuple[Any, ...]) -> None:
    before = History(CHARGED, mark=mark, no_progress=1)
    found = after(before, reached, least=least)
    assert (found.mark, found.no_progress, found.charged) == expected


def test_small_steps_add_up_to_progress() -> None:
    found = after(History(CHARGED), 10, 14, 18, 22, least=10)
    assert (found.mark, found.no_progress, found.charged) == (22, 0, ())


def test_progress_without_an_iteration() -> None:
    history, seen = History(), []
    for pinged in (False, True, False, True, False):
        history = history.ended(EndedRun(pinged=pinged), 1)
        seen.append((history.mark, history.no_progress))
    assert seen == [(None, 0), (NO_ITERATION, 0), (NO_ITERATION, 1), (NO_ITERATION, 0), (NO_ITERATION, 1)]
    # From the first iteration on the pings no longer count.
    assert [(found.mark, found.no_progress) for found in (after(history, 0), after(history, 0, 0))] == [(0, 0), (0, 1)]
    assert after(history, 5).ended(EndedRun(reached=5, pinged=True), 1).no_progress == 1


@pytest.mark.parametrize(
    ("runs", "times"),
    [
        ([BAD, BAD], 2),
        ([BAD, replace(BAD, error_text="two")], 1),
        ([replace(BAD, compares_text=False), replace(BAD, error_text="two", compares_text=False)], 2),
        ([replace(BAD, iteration=1), replace(BAD, iteration=2)], 1),
        ([replace(BAD, reached=1), replace(BAD, reached=2)], 1),
        ([replace(BAD, reached=2), replace(BAD, reached=2)], 2),
        ([BAD, replace(BAD, pinged=True)], 2),
        ([BAD, EndedRun(), BAD], 1),
    ],
)
def test_the_same_error_in_a_row(runs: list[EndedRun], times: int) -> None:
    history = History()
    for run in runs:
        history = history.ended(run, 1)
    assert history.same_errors == times


def test_what_the_window_has_passed_is_forgotten() -> None:
    assert History((1.0, 5.0)).ended(EndedRun(), 1, now=12.0, window_s=10.0).charged == (5.0,)


RECORDS = st.builds(
    History,
    charged=st.lists(st.floats(0, 1e6), max_size=5).map(tuple),
    mark=st.none() | st.integers(NO_ITERATION, 10**12),
    no_progress=st.integers(0, 99),
    error=st.text(max_size=80),
    error_text=st.text(max_size=16),
    early_errors=st.integers(0, 99),
    error_iteration=st.integers(-1, 10**9),
    same_errors=st.integers(0, 99),
    moves=st.integers(0, 99),
    young=st.integers(0, 99),
    fault_class=st.sampled_from(["", "hang", "memory"]),
    same_class=st.integers(0, 99),
)


@given(RECORDS, st.floats(1e6, 1e7), st.floats(0, 1e7))
def test_a_record_keeps_ages_over_clocks(history: History, now: float, other_now: float) -> None:
    record = json.loads(json.dumps(history.to_record(now)))
    found = History.from_record(record, other_now)
    assert replace(found, charged=()) == replace(history, charged=())
    ages = [other_now - at for at in found.charged]
    assert ages == pytest.approx([now - at for at in history.charged], abs=1e-6)


@pytest.mark.parametrize(
    "record",
    [
        {"charged": 3},
        {"charged": ["1"]},
        {"charged": [-1.0]},
        {"charged": [float("nan")]},
        {"charged": [float("inf")]},
        {"charged": [True]},
        {"mark": "5"},
        {"young": None},
        {"error": 1},
        {"moves": "1"},
        {"fault_class": None},
        {"colour": "red"},
    ],
    ids=str,
)
def test_a_record_that_is_none_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        History.from_record(record, 0.0)


def test_a_missing_field_has_its_default() -> None:
    assert History.from_record({}, 0.0) == History()
