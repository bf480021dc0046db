"""Samples against the standard library's statistics."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_client.straggler.samples import MAX_SAMPLES, Samples, Statistic, summaries


@given(st.lists(st.lists(st.floats(0, 1e6), max_size=20), max_size=6))
def test_a_summary_says_what_the_standard_library_says(rows: list[list[float]]) -> None:
    samples = {f"work {index}": Samples() for index in range(len(rows))}
    for one, values in zip(samples.values(), rows, strict=True):
        for value in values:
            one.add(value)
    with_values = {name: values for name, values in zip(samples, rows, strict=True) if values}
    found = summaries(samples)
    assert list(found) == list(with_values)
    for name, values in with_values.items():
        assert found[name] == {
            Statistic.MIN: min(values),
            Statistic.MAX: max(values),
            Statistic.MED: pytest.approx(statistics.median(values)),
            Statistic.AVG: pytest.approx(statistics.fmean(values)),
            Statistic.STD: pytest.approx(statistics.pstdev(values), abs=1e-3, rel=1e-6),
            Statistic.NUM: len(values),
        }
    assert summaries(samples) == {}


def test_the_last_samples_count() -> None:
    samples = Samples()
    for value in range(MAX_SAMPLES + 3):
        samples.add(value)
    summary = summaries({"work": samples})["work"]
    assert (summary[Statistic.NUM], summary[Statistic.MIN], summary[Statistic.MAX]) == (8192, 3, 8194)
    samples.add(7)
    assert summaries({"work": samples})["work"][Statistic.MED] == 7
