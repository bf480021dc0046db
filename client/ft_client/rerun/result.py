"""A result of a step: how it is checked, copied, compared and written down. It is a number, or a tensor of one element.

`state_machine.py` and `validation.py` call it, once or a few times in each step. The arguments of the public calls are
checked here, too: every error names its argument. What a difference means is not decided here.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeVar

import torch

from ft_client.rank.argument_checks import check_count

Choice = TypeVar("Choice", bound=enum.Enum)
Result = Any
"""A real number, or a tensor of one element on any device."""


def check_result(result: Result) -> None:
    """Checks that a result is one real number. Does not wait for a device: a tensor's value is not read.

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
    """Returns the value as a number. Waits for the device that computes it."""
    if isinstance(result, torch.Tensor):
        value = result.item()
    else:
        value = result
    if isinstance(value, Integral):
        return int(value)
    return float(value)


def host_copy(result: Result) -> Result:
    """Returns a copy in host memory, which later work on the tensor does not change. Waits for the device."""
    if isinstance(result, torch.Tensor):
        return result.detach().to("cpu", copy=True)
    return result


def to_json(result: Result) -> dict[str, Any]:
    """Returns the value as text, since JSON has no NaN, with type and shape where it is a tensor."""
    form: dict[str, Any] = {"value": repr(number(result))}
    if isinstance(result, torch.Tensor):
        form |= {"dtype": str(result.dtype).removeprefix("torch."), "shape": list(result.shape)}
    return form


def from_json(form: dict[str, Any]) -> Result:
    """Returns exactly the result that `to_json` wrote: a text of a float has all its digits."""
    text = form["value"]
    value: int | float
    if text.lstrip("-").isdigit():
        value = int(text)
    else:
        value = float(text)
    if "dtype" not in form:
        return value
    return torch.tensor(value, dtype=getattr(torch, form["dtype"])).reshape(form["shape"])


def relative_difference(first: Result, second: Result) -> float:
    """Returns |a - b| over the mean of |a| and |b|: 0 for equal values and for NaN with NaN, at most 2 for finite ones.

    Finite for opposite signs, and without overflow; an infinity equals only itself: `inf` for any other pair.
    """
    a = number(first)
    b = number(second)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    largest = max(abs(a), abs(b))
    a, b = a / largest, b / largest
    return 2 * abs(a - b) / (abs(a) + abs(b))


def difference(comparison_func: Callable[[Result, Result], Any] | None, first: Result, second: Result) -> float:
    """Returns the distance of two results, by the user's comparison or by `relative_difference`.

    Where the comparison gives NaN, as |a - b| does for NaN and infinities, `relative_difference` is used.

    Raises:
        RuntimeError, TypeError: naming `comparison_func`: it raised, or gave no number.
    """
    if comparison_func is None:
        return relative_difference(first, second)
    try:
        apart = comparison_func(first, host_copy(second))
    except Exception as error:
        raise RuntimeError(f"comparison_func raised {error!r} for the results {first!r} and {second!r}") from error
    try:
        distance = float(apart)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"comparison_func gave {apart!r}, which is not a number") from error
    if math.isnan(distance):
        return relative_difference(first, second)
    return distance


def choice(name: str, value: Any, of: type[Choice]) -> Choice:
    """Returns the member of an Enum that the user means: `value` is the member itself, or the member's value.

    Raises:
        ValueError: it is neither; the text names the argument and the known values.
    """
    try:
        return of(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in of)
        raise ValueError(f"{name}={value!r} must be one of {known}") from None


def check_callable(name: str, function: Any) -> None:
    """Checks that `function` is None or can be called.

    Raises:
        TypeError: naming the argument.
    """
    if function is not None and not callable(function):
        raise TypeError(f"{name}={function!r} cannot be called")


def check_large(result: Result, threshold: float, num_samples: int) -> None:
    """Checks the arguments of `is_unexpectedly_large`.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    check_result(result)
    check_count("num_samples", num_samples, 1)
    if not isinstance(threshold, (int, float)) or not (math.isfinite(threshold) and threshold > 0):
        raise ValueError(f"threshold={threshold!r} is not a finite number above 0")


@dataclass(frozen=True)
class Check:
    """One check of a result: the arguments of `validate_result`. Raises TypeError or ValueError on creation."""

    result: Result
    rejection_func: Callable[[Any], Any]
    message: str
    comparison_func: Callable[[Any, Any], Any] | None
    tolerance: float
    fatal: bool

    def __post_init__(self) -> None:
        check_result(self.result)
        if self.rejection_func is None:
            raise TypeError("rejection_func=None cannot be called")
        check_callable("rejection_func", self.rejection_func)
        check_callable("comparison_func", self.comparison_func)
        if not isinstance(self.message, str):
            raise TypeError(f"message={self.message!r} is not text")
        if not isinstance(self.tolerance, (int, float)) or not self.tolerance >= 0:
            raise ValueError(f"tolerance={self.tolerance!r} is not a number of at least 0")

    def rejects(self) -> bool:
        """Returns whether `rejection_func` rejects the result.

        Raises:
            TypeError: naming `rejection_func`: it gave no truth value.
        """
        answer = self.rejection_func(self.result)
        try:
            return bool(answer)
        except (RuntimeError, ValueError) as error:
            raise TypeError(f"rejection_func gave {answer!r}, which is not one truth value") from error

    def difference(self, first: Result) -> float:
        """Returns the distance of this run's result from that of the first run."""
        return difference(self.comparison_func, first, self.result)

    def reproduces(self, first: Result) -> bool:
        """Returns whether this run's result is the same as that of the first run, within the tolerance."""
        return self.difference(first) <= self.tolerance
