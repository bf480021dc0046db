"""Who is slow by a report."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from ft_client.straggler import Report, StragglerId

REPORT = Report(
    gpu_relative_perf_scores={0: 1.0, 1: 0.74, 2: math.nan},
    section_relative_perf_scores={"load": {0: 1.0, 1: 0.75, 2: 0.3}, "work": {0: 0.9, 1: 1.0}},
    gpu_individual_perf_scores={0: 0.5, 1: 1.0, 2: math.nan},
    section_individual_perf_scores={"load": {0: 1.0}, "work": {1: 0.1}},
    rank_to_node={0: "a", 1: "a", 2: "b"},
)


def test_stragglers_by_the_default_thresholds() -> None:
    assert REPORT.identify_stragglers() == {
        "straggler_gpus_relative": {StragglerId(1, "a")},
        "straggler_gpus_individual": {StragglerId(0, "a")},
        "straggler_sections_relative": {"load": {StragglerId(2, "b")}},
        "straggler_sections_individual": {"work": {StragglerId(1, "a")}},
    }


def test_thresholds_of_their_own() -> None:
    found = REPORT.identify_stragglers(
        gpu_rel_threshold=0.5, section_rel_threshold=1.0, gpu_indiv_threshold=0.5, section_indiv_threshold=0.1
    )
    assert found == {
        "straggler_gpus_relative": set(),
        "straggler_gpus_individual": set(),
        "straggler_sections_relative": {
            "load": {StragglerId(1, "a"), StragglerId(2, "b")},
            "work": {StragglerId(0, "a")},
        },
        "straggler_sections_individual": {},
    }


@pytest.mark.parametrize(
    "name", ["gpu_rel_threshold", "section_rel_threshold", "gpu_indiv_threshold", "section_indiv_threshold"]
)
@pytest.mark.parametrize("value", [0, -0.1, 1.01, math.nan, math.inf, "0.7", None, True])
def test_thresholds_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*above 0 and at most 1"):
        REPORT.identify_stragglers(**{name: value})


def test_a_report_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORT.rank = 1  # type: ignore[misc]
