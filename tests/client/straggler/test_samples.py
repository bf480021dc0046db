"""Samples against the standard library's statistics."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_client.straggler.samples import MAX_SAMPLES, Samples, Statistic


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_a_summary_says_what_the_standard_library_says(values: list[float]) -> None:
    samples = Samples()
    for value in values:
        samples.add(value)
    summary = samples.taken()
    assert summary[Statistic.MIN] == min(values)
    assert summary[Statistic.MAX] == max(values)
    assert summary[Statistic.MED] == pytest.approx(statistics.median(values))
    assert summary[Statistic.AVG] == pytest.approx(statistics.fmean(values))
    assert summary[Statistic.STD] == pytest.approx(statistics.pstdev(values), abs=1e-3, rel=1e-6)
    assert summary[Statistic.NUM] == len(values)
    assert samples.taken() == {}


def test_the_last_samples_count() -> None:
    samples = Samples()
    for value in range(MAX_SAMPLES + 3):
        samples.add(value)
    summary = samples.taken()
    assert (summary[Statistic.NUM], summary[Statistic.MIN], summary[Statistic.MAX]) == (8192, 3, 8194)
    samples.add(7)
    assert samples.taken()[Statistic.MED] == 7
