"""What a result may be, how it travels, and how two are compared."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ft_client.rerun import result
from ft_client.rerun.result import difference, relative_difference

finite = st.floats(allow_nan=False, allow_infinity=False)
anything = st.floats() | st.integers(-(10**30), 10**30)


@given(finite, finite)
@example(1.7e308, -1.7e308)
@example(5e-324, -5e-324)
@example(5e-324, 1e-323)
@example(0.0, -0.0)
def test_a_difference_of_finite_values_is_finite(a: float, b: float) -> None:
    apart = relative_difference(a, b)
    assert 0 <= apart <= 2
    assert (apart == 0) == (a == b)
    assert apart == relative_difference(b, a)
    if a != 0 and b != 0 and (a > 0) != (b > 0):
        assert apart == 2, "opposite signs"


@given(anything)
def test_a_value_is_like_itself_only(a: float) -> None:
    assert relative_difference(a, a) == 0
    for other in (math.inf, -math.inf, math.nan):
        same = a == other or (math.isnan(a) and math.isnan(other))
        assert relative_difference(a, other) == (0 if same else math.inf)


@given(anything, st.sampled_from([None, torch.float32, torch.float64, torch.bfloat16]), st.booleans())
def test_json(value: float, dtype: Any, one_row: bool) -> None:
    kept = value if dtype is None else torch.tensor([float(value)] if one_row else float(value), dtype=dtype)
    again = result.from_json(json.loads(json.dumps(result.to_json(kept), allow_nan=False)))
    assert repr(again) == repr(kept)
    assert relative_difference(kept, again) == 0


def test_integers_and_booleans_of_torch() -> None:
    for kept in (torch.tensor(2**62 + 1), torch.tensor(True), torch.tensor([3], dtype=torch.int8)):
        again = result.from_json(result.to_json(kept))
        assert again.dtype == kept.dtype and again.equal(kept)


@pytest.mark.parametrize("value", [1, 1.5, True, np.float32(2), np.int64(3), Fraction(1, 2), torch.tensor([[1.0]])])
def test_numbers(value: Any) -> None:
    result.check_result(value)
    assert result.number(value) == float(value)


@pytest.mark.parametrize(
    "value", ["1", None, [1.0], 1j, np.ones(1), torch.tensor([1.0, 2.0]), torch.tensor([]), torch.tensor(1j)]
)
def test_no_numbers(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="result"):
        result.check_result(value)


def test_what_is_kept_does_not_change() -> None:
    value = torch.tensor(1.0, requires_grad=True)
    kept = result.host_copy(value)
    with torch.no_grad():
        value += 1
    assert kept == 1 and not kept.requires_grad


@pytest.mark.parametrize(
    ("first", "second", "apart"),
    [
        (math.nan, math.nan, 0),
        (math.inf, math.inf, 0),
        (math.nan, 1.0, math.inf),
        (torch.tensor(math.nan), 1.0, math.inf),
    ],
)
def test_an_own_comparison_that_cannot_tell(first: Any, second: Any, apart: float) -> None:
    assert difference(lambda a, b: abs(a - b), first, second) == apart


def test_own_comparison() -> None:
    assert difference(lambda a, b: abs(a - b), torch.tensor(1.0), torch.tensor(3.0)) == 2
    with pytest.raises(RuntimeError, match="comparison_func raised ZeroDivisionError"):
        difference(lambda a, b: a / b, 1.0, 0.0)
    for none in ("far", None, torch.ones(2)):
        with pytest.raises(TypeError, match="comparison_func gave"):
            difference(lambda a, b, apart=none: apart, 1.0, 1.0)
