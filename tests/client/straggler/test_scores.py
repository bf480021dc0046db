"""Properties of the scores, and the formulas by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_client.straggler import scores
from ft_client.straggler.samples import Statistic, Summary

durations = st.floats(0, 1e9)
NAMES = ("a", "b", "c")


def summary(med: float, num: float = 1.0, avg: float | None = None) -> Summary:
    return {Statistic.MED: med, Statistic.NUM: num, Statistic.AVG: med if avg is None else avg}


summaries = st.dictionaries(
    st.sampled_from(NAMES), st.builds(summary, durations, st.integers(1, 8192).map(float), durations), min_size=1
)


def lowest(ranks: list[dict[str, Summary]]) -> dict[str, float]:
    """What the MIN all-reduce gives."""
    return {
        name: min(one[name][Statistic.MED] for one in ranks if name in one)
        for name in NAMES
        if any(name in one for one in ranks)
    }


@given(st.lists(summaries, min_size=1, max_size=6))
def test_scores_are_above_0_and_at_most_1_and_the_fastest_has_1(ranks: list[dict[str, Summary]]) -> None:
    references = lowest(ranks)
    of_sections = [scores.section_scores(references, one) for one in ranks]
    for found, one in zip(of_sections, ranks, strict=True):
        assert set(found) == set(one)
        assert all(0 < score <= 1 for score in found.values())
        assert min(found.values()) * 0.999999 <= scores.gpu_score(references, one) <= max(found.values()) * 1.000001
    for name in references:
        assert max(found[name] for found in of_sections if name in found) == 1


@given(durations, durations, durations)
def test_a_slower_rank_has_no_better_score(reference: float, median: float, more: float) -> None:
    assert scores.score(reference, median + more) <= scores.score(reference, median)


@given(st.lists(summaries, min_size=1, max_size=8))
def test_individual_scores_compare_with_the_best_so_far(reports: list[dict[str, Summary]]) -> None:
    best: dict[str, float] = {}
    for index, one in enumerate(reports):
        best = scores.best(best, one)
        assert best == lowest(reports[: index + 1])
        assert all(0 < score <= 1 for score in scores.section_scores(best, one).values())


@given(summaries, st.floats(1, 1e3))
def test_a_rank_that_is_slower_by_a_factor_has_its_inverse(one: dict[str, Summary], factor: float) -> None:
    one = {name: summary(1 + of[Statistic.MED], of[Statistic.NUM]) for name, of in one.items()}
    slower = {name: summary(of[Statistic.MED] * factor, of[Statistic.NUM]) for name, of in one.items()}
    assert scores.gpu_score(scores.medians(one), slower) == pytest.approx(1 / factor)
    assert scores.section_scores(scores.medians(one), slower) == pytest.approx(dict.fromkeys(one, 1 / factor))


def test_kernels_weigh_by_their_time() -> None:
    own = {"big": summary(10, 90, 20), "small": summary(10, 10, 20), "nobody else's": summary(1, 1e6)}
    assert scores.gpu_score({"big": 5.0, "small": 10.0}, own) == pytest.approx(0.9 * 0.5 + 0.1 * 1.0)


def test_no_kernel_to_compare_is_nan_and_nothing_else_is() -> None:
    assert math.isnan(scores.gpu_score({}, {"a": summary(1)}))
    assert math.isnan(scores.gpu_score({"a": 1.0}, {}))
    assert scores.section_scores({}, {"a": summary(1)}) == {}
    assert scores.score(0.0, 0.0) == 1
    assert scores.gpu_score({"a": 0.0}, {"a": summary(0)}) == 1
