"""Limits from observed intervals: one-line histories and what they teach."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ft_client.rank.monitoring.learned_limits import (
    HeartbeatTimeouts,
    LearnedLimits,
    LimitFactors,
    Observed,
    SectionTimeouts,
    floored,
    learned_from,
    learned_in,
    positive,
)
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.messages import LimitsSet

S = 1_000_000_000
SETTINGS = MonitorSettings(rank_section_timeouts={"step": 180.0, "setup": None}, rank_out_of_section_timeout=60.0)


def observed(*signs_s: float) -> Observed:
    """A training that asked to be watched at 100 s and beat at these moments."""
    seen = Observed()
    seen.begin(100 * S)
    for at_s in signs_s:
        seen.sign(int(at_s * S))
    return seen


@pytest.mark.parametrize(
    ("signs_s", "longest"),
    [
        ((), {}),
        ((107,), {"initial": 7.0}),
        ((107, 108), {"initial": 7.0, "subsequent": 1.0}),
        ((101, 103, 113, 114), {"initial": 1.0, "subsequent": 10.0}),
    ],
)
def test_heartbeats(signs_s: tuple[float, ...], longest: dict[str, float]) -> None:
    assert observed(*signs_s).longest() == longest


def test_a_second_watch_has_its_own_first_sign() -> None:
    seen = observed(107, 108)
    seen.begin(500 * S)
    seen.sign(502 * S)
    assert seen.longest() == {"initial": 7.0, "subsequent": 1.0}


def test_sections_and_the_time_between() -> None:
    seen = observed()
    seen.entered(104 * S)
    for took_s in (3, 9, 2):
        seen.closed("save", took_s * S)
    seen.left(120 * S)
    seen.entered(121 * S)
    assert seen.longest() == {"out_of_section": 4.0, "section:save": 9.0}


@pytest.mark.parametrize(
    ("warmup", "steps_s", "longest_s"),
    [(0, [60, 1], 60), (1, [60, 1, 2], 2), (2, [60, 50, 1], 1), (5, [60, 1], 60)],
)
def test_steps_of_the_warm_up_teach_only_when_there_are_no_others(
    warmup: int, steps_s: list[int], longest_s: int
) -> None:
    seen = observed()
    seen.warm_up(warmup)
    for took_s in steps_s:
        seen.closed("step", took_s * S)
    assert seen.longest() == {"section:step": longest_s}


def test_a_learned_limit_is_the_longest_times_the_factor_and_at_least_the_floor() -> None:
    assert learned_from({"initial": 100.0, "subsequent": 0.2}, SETTINGS) == {"initial": 500.0, "subsequent": 10.0}


def test_what_was_learned_before_is_merged_by_mean() -> None:
    limits = LearnedLimits.configured(SETTINGS)
    assert limits.averaged({"subsequent": 30.0}) == {"subsequent": 30.0}
    assert limits.adopting({"subsequent": 30.0}).averaged({"subsequent": 10.0, "initial": 7.0}) == {
        "subsequent": 20.0,
        "initial": 7.0,
    }


def test_a_learned_limit_overrides_a_configured_one_and_others_stay() -> None:
    limits = LearnedLimits.configured(SETTINGS).adopting({"section:setup": 50.0, "section:new": 20.0})
    assert limits.message() == LimitsSet(
        initial=3600.0,
        subsequent=2700.0,
        sections={"step": 180.0, "setup": 50.0, "new": 20.0},
        out_of_section=60.0,
        learned=["section:new", "section:setup"],
        state=limits.state(),
    )


def test_state_is_plain_json_and_its_parts_appear_when_learned() -> None:
    limits = LearnedLimits.configured(SETTINGS)
    assert limits.state() == {"current_timeouts": {}}
    limits = limits.adopting({"section:step": 40.0, "section:a": 30.0})
    section = {
        "section": {"step": 40.0, "setup": None, "a": 30.0},
        "out_of_section": 60.0,
        "calculated_sections": ["a", "step"],
        "is_out_of_section_calculated": False,
    }
    assert limits.state() == {"current_timeouts": {"section": section}}
    limits = limits.adopting({"initial": 15.0, "subsequent": 12.0, "out_of_section": 11.0})
    heartbeat = {"initial": 15.0, "subsequent": 12.0, "were_calculated": True}
    section |= {"out_of_section": 11.0, "is_out_of_section_calculated": True}
    assert limits.state() == {"current_timeouts": {"heartbeat": heartbeat, "section": section}}
    assert learned_in(json.loads(json.dumps(limits.state()))) == {
        "section:step": 40.0,
        "section:a": 30.0,
        "initial": 15.0,
        "subsequent": 12.0,
        "out_of_section": 11.0,
    }


def test_what_was_only_configured_when_saved_is_not_learned() -> None:
    state = {
        "current_timeouts": {
            "heartbeat": {"initial": 1.0, "subsequent": 2.0, "were_calculated": False},
            "section": {"section": {"step": 3.0}, "out_of_section": 4.0, "calculated_sections": []},
        }
    }
    assert learned_in(state) == {}
    assert learned_in({}) == {}


def test_the_flat_state_of_the_first_releases() -> None:
    flat = {"initial": 40.0, "subsequent": 20.0, "were_calculated": True}
    assert learned_in({"current_timeouts": flat}) == {"initial": 40.0, "subsequent": 20.0}
    assert learned_in({"current_timeouts": {**flat, "were_calculated": False}}) == {}


@pytest.mark.parametrize(
    "state",
    [
        [],
        {"current_timeouts": {"initial": 1.0, "subsequent": "x", "were_calculated": True}},
        {"current_timeouts": 3},
        {"current_timeouts": {"heartbeat": []}},
        {"current_timeouts": {"heartbeat": {"were_calculated": True}}},
        {"current_timeouts": {"heartbeat": {"were_calculated": True, "initial": 1.0, "subsequent": "x"}}},
        {"current_timeouts": {"heartbeat": {"were_calculated": True, "initial": -1.0, "subsequent": 1.0}}},
        {"current_timeouts": {"section": {"section": {"a": 1.0}, "calculated_sections": "a"}}},
        {"current_timeouts": {"section": {"section": {"a": float("nan")}, "calculated_sections": ["a"]}}},
        {"current_timeouts": {"section": {"section": {}, "calculated_sections": ["a"]}}},
        {"current_timeouts": {"section": {"calculated_sections": [1]}}},
    ],
)
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="is"):
        learned_in(state)


def test_a_loaded_limit_is_not_below_the_floor() -> None:
    assert floored({"subsequent": 0.12, "initial": 30.0}, SETTINGS) == {"subsequent": 10.0, "initial": 30.0}


def test_multipliers_apply_to_what_is_loaded_or_else_once_to_what_is_learned() -> None:
    factors = LimitFactors({"subsequent": 2.0, "section:step": 4.0})
    assert factors({"subsequent": 10.0, "initial": 10.0}, loaded=True)[0] == {"subsequent": 20.0, "initial": 10.0}
    assert factors({"subsequent": 15.0}, loaded=False) == ({"subsequent": 15.0}, [])
    assert factors({"subsequent": 10.0}, loaded=True)[0] == {"subsequent": 20.0}
    limits, words = factors({"section:step": 5.0}, loaded=False)
    assert limits == {"section:step": 20.0}
    assert words == [
        "limit section:step is 20 s instead of 5 s: it ended a cycle, so it is multiplied by 4",
    ]
    assert factors({"section:step": 6.0}, loaded=False)[0] == {"section:step": 6.0}


@pytest.mark.parametrize("value", [0, -1, True, "2", None, float("inf"), float("nan")])
def test_only_finite_numbers_above_zero_are_limits(value: object) -> None:
    with pytest.raises(ValueError, match=r"subsequent is .*, not a finite number above zero"):
        positive("subsequent", value)


@pytest.mark.parametrize(
    ("sections", "were_calculated", "are_valid"),
    [
        (SectionTimeouts({}, None), False, False),
        (SectionTimeouts({"step": 1.0}, 2.0), False, True),
        (SectionTimeouts({"step": 1.0}, 2.0, ("step",), True), True, True),
        (SectionTimeouts({"step": 1.0, "setup": None}, 2.0, ("step",), True), False, False),
    ],
)
def test_what_is_known_of_limits(sections: SectionTimeouts, were_calculated: bool, are_valid: bool) -> None:
    assert (sections.were_calculated, sections.are_valid) == (were_calculated, are_valid)
    assert HeartbeatTimeouts(1.0, 2.0).are_valid and not HeartbeatTimeouts(1.0, None).are_valid
