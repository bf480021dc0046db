"""One result as it is checked, kept, compared and written down: a number, or a tensor of one element.

Knows nothing of reruns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch

Result = Any
"""A real number, or a tensor of one element on any device."""


def check(result: Result) -> None:
    """Says no to what is not one real number.

    Raises:
        TypeError, ValueError: naming `result`.
    """
    if isinstance(result, torch.Tensor):
        if result.numel() != 1:
            shape = tuple(result.shape)
            raise ValueError(f"result: a tensor of shape {shape} has not one element; reduce it first, as by .max()")
        if result.is_complex():
            raise TypeError(f"result={result!r} is complex, not a real number")
    elif not isinstance(result, Real):
        raise TypeError(f"result={result!r} is neither a number nor a tensor of one element")


def number(result: Result) -> float | int:
    """The value; waits for the device."""
    value = result.item() if isinstance(result, torch.Tensor) else result
    return int(value) if isinstance(value, Integral) else float(value)


def keep(result: Result) -> Result:
    """A copy in host memory that nothing changes any more."""
    return result.detach().to("cpu", copy=True) if isinstance(result, torch.Tensor) else result


def to_json(result: Result) -> dict[str, Any]:
    """The value as text (JSON has no NaN), and how to make the tensor again."""
    form: dict[str, Any] = {"value": repr(number(result))}
    if isinstance(result, torch.Tensor):
        form |= {"dtype": str(result.dtype).removeprefix("torch."), "shape": list(result.shape)}
    return form


def from_json(form: dict[str, Any]) -> Result:
    """What `to_json` wrote, exactly."""
    text = form["value"]
    value = int(text) if text.lstrip("-").isdigit() else float(text)
    if "dtype" not in form:
        return value
    return torch.tensor(value, dtype=getattr(torch, form["dtype"])).reshape(form["shape"])


def relative_difference(first: Result, second: Result) -> float:
    """|a - b| over the mean of |a| and |b|: 0 for equal values and for NaN with NaN, at most 2 for finite ones.

    Finite for opposite signs, and without overflow; an infinity equals only itself: `inf` for any other pair.
    """
    a, b = number(first), number(second)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    largest = max(abs(a), abs(b))
    a, b = a / largest, b / largest
    return 2 * abs(a - b) / (abs(a) + abs(b))


def difference(comparison_func: Callable[[Result, Result], Any] | None, first: Result, second: Result) -> float:
    """How far two results are apart, by the user's comparison or by `relative_difference`.

    One that gives NaN, as |a - b| does for NaN and infinities, cannot tell: `relative_difference` does then.

    Raises:
        RuntimeError, TypeError: naming `comparison_func`: it raised, or gave no number.
    """
    if comparison_func is None:
        return relative_difference(first, second)
    try:
        apart = comparison_func(first, keep(second))
    except Exception as error:
        raise RuntimeError(f"comparison_func raised {error!r} for the results {first!r} and {second!r}") from error
    try:
        distance = float(apart)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"comparison_func gave {apart!r}, which is no number") from error
    return relative_difference(first, second) if math.isnan(distance) else distance
