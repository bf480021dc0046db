"""The largest of the first results, and how far reruns differ."""

from __future__ import annotations

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ft_client.rerun.result_statistics import KEPT, LargestSeen, Variability, summary


def large(seen: LargestSeen, value: float, resample: bool = False, count: bool = True) -> bool:
    return seen.is_large(value, 10.0, "loss", 3, resample, count)


def test_the_first_samples_set_the_maximum() -> None:
    seen = LargestSeen()
    assert not any(large(seen, value) for value in (1.0, -2.0, 1.0))
    assert not large(seen, 20.0)
    assert large(seen, 20.1) and large(seen, -20.1)
    assert not large(seen, 20.0), "later results are no samples"


def test_nan_and_infinities_are_neither_large_nor_samples() -> None:
    seen = LargestSeen()
    for value in (math.nan, math.inf, -math.inf, 1.0, 1.0, 1.0, math.nan, math.inf, -math.inf):
        assert not large(seen, value)
    assert large(seen, 11.0)


def test_reruns_are_no_samples() -> None:
    seen = LargestSeen()
    for _ in range(10):
        large(seen, 100.0, count=False)
    assert [large(seen, value) for value in (1.0, 1.0, 1.0, 11.0)] == [False, False, False, True]


def test_a_maximum_of_nothing_is_no_measure() -> None:
    seen = LargestSeen()
    assert not any(large(seen, value) for value in (0.0, 0.0, 0.0, 5.0))


def test_resampling() -> None:
    seen = LargestSeen()
    for value in (1.0, 1.0, 1.0):
        large(seen, value)
    assert not large(seen, 100.0, resample=True)
    assert not any(large(seen, value) for value in (100.0, 100.0, 999.0))
    assert large(seen, 1001.0)


def test_the_rerun_of_a_resampling_step_forgets_nothing() -> None:
    seen = LargestSeen()
    for count in (True, False):
        assert not large(seen, 7.0, resample=True, count=count)
    assert seen.state_dict() == {"loss": {"maximum": 7.0, "samples": 1}}


def test_over_a_restart() -> None:
    seen, again = LargestSeen(), LargestSeen()
    for value in (1.0, 1.0, 1.0):
        large(seen, value)
    again.load_state_dict(json.loads(json.dumps(seen.state_dict())))
    assert large(again, 11.0)


@given(st.lists(st.floats(0, 2), min_size=1, max_size=200))
def test_a_summary_holds_seen_values(values: list[float]) -> None:
    shown = dict(pair.split("=") for pair in summary(values).split())
    assert list(shown) == ["avg", "p50", "p90", "p99", "p99.9", "max"]
    seen = {f"{value:.6g}" for value in values}
    assert {shown[name] for name in ("p50", "p90", "p99", "p99.9", "max")} <= seen
    assert shown["max"] == f"{max(values):.6g}"
    assert shown["avg"] == f"{np.mean(values):.6g}"


def test_a_summary_with_infinities() -> None:
    assert summary([0.0, 0.0, math.inf]) == "avg=inf p50=0 p90=inf p99=inf p99.9=inf max=inf"


def test_reports() -> None:
    seen = Variability()
    for value in range(2 * KEPT):
        seen.add("a.py:1 'loss'", float(value))
    other = Variability()
    other.add("b.py:2 'norm'", 1.0)
    assert [number for number in range(1, 301) if seen.is_due()] == [1, 10, 100, 200, 300]
    first, second = seen.report([seen.to_text(0), other.to_text(1), other.to_text(2)])
    assert first.startswith(f"Variability of results after 300 reruns: a.py:1 'loss' samples={KEPT} avg=")
    assert second.endswith("b.py:2 'norm' samples=2 avg=1 p50=1 p90=1 p99=1 p99.9=1 max=1")
