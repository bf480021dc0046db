"""Whether a rank gets the signal for its stacks: by table."""

from __future__ import annotations

import pytest

from rank_monitor.stack_signal import BETWEEN_LOOKS_S, FIRST_LOOK_S, Unanswered, is_at_rest, may_signal

SECOND_LOOK_S = FIRST_LOOK_S + BETWEEN_LOOKS_S
SLEEPS = {1: ("S", 100), 2: ("S", 5)}


@pytest.mark.parametrize(
    ("waited_s", "was_sent", "at_rest", "is_ending", "expected"),
    [
        # The rank goes on living: only what is proved not to execute Python.
        (SECOND_LOOK_S, True, True, False, True),
        (SECOND_LOOK_S, True, False, False, False),
        (60.0, True, False, False, False),
        (FIRST_LOOK_S, True, True, False, False),
        (0.0, True, True, False, False),
        (60.0, False, True, False, False),
        (60.0, False, False, False, False),
        # The rank is ended anyway: what does not answer, or cannot.
        (FIRST_LOOK_S, True, False, True, True),
        (FIRST_LOOK_S, True, True, True, True),
        (FIRST_LOOK_S / 2, True, True, True, False),
        (0.0, True, False, True, False),
        (0.0, False, False, True, True),
        (0.0, False, True, True, True),
    ],
)
def test_the_table(waited_s: float, was_sent: bool, at_rest: bool, is_ending: bool, expected: bool) -> None:
    assert may_signal(Unanswered(waited_s, was_sent, at_rest, is_ending)) is expected


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (SLEEPS, SLEEPS, True),
        ({}, SLEEPS, False),
        ({}, {}, False),
        (SLEEPS, {}, False),
        (SLEEPS, {1: ("S", 100), 2: ("S", 6)}, False),
        (SLEEPS, {1: ("R", 100), 2: ("S", 5)}, False),
        ({1: ("R", 100)}, {1: ("R", 100)}, False),
        ({1: ("D", 100)}, {1: ("D", 100)}, False),
        ({1: ("t", 100)}, {1: ("t", 100)}, False),
        (SLEEPS, {1: ("S", 100)}, False),
        (SLEEPS, SLEEPS | {3: ("S", 0)}, False),
    ],
)
def test_what_is_at_rest(before: dict[int, tuple[str, int]], now: dict[int, tuple[str, int]], expected: bool) -> None:
    assert is_at_rest(before, now) is expected
