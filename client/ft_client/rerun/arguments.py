"""The arguments of the public calls, looked at before anything is done with them. Every error names its argument."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ft_client.given import check_count
from ft_client.rerun import result as results

Choice = TypeVar("Choice", bound=enum.Enum)


def choice(name: str, value: Any, of: type[Choice]) -> Choice:
    """The member of `of` that `value` is, or is the value of.

    Raises:
        ValueError: it is none.
    """
    try:
        return of(value)
    except ValueError:
        known = ", ".join(str(one.value) for one in of)
        raise ValueError(f"{name}={value!r} is none of {known}") from None


def check_callable(name: str, function: Any) -> None:
    """Raises TypeError for what is neither None nor can be called."""
    if function is not None and not callable(function):
        raise TypeError(f"{name}={function!r} cannot be called")


def check_large(result: results.Result, threshold: float, num_samples: int) -> None:
    """Raises TypeError or ValueError for what cannot be judged as large."""
    results.check(result)
    check_count("num_samples", num_samples, 1)
    if not isinstance(threshold, (int, float)) or not (math.isfinite(threshold) and threshold > 0):
        raise ValueError(f"threshold={threshold!r} is no finite number above 0")


@dataclass(frozen=True)
class Check:
    """What `validate_result` was given. Raises TypeError or ValueError on creation."""

    result: results.Result
    rejection_func: Callable[[Any], Any]
    message: str
    comparison_func: Callable[[Any, Any], Any] | None
    tolerance: float
    fatal: bool

    def __post_init__(self) -> None:
        results.check(self.result)
        if self.rejection_func is None:
            raise TypeError("rejection_func=None cannot be called")
        check_callable("rejection_func", self.rejection_func)
        check_callable("comparison_func", self.comparison_func)
        if not isinstance(self.message, str):
            raise TypeError(f"message={self.message!r} is no text")
        if not isinstance(self.tolerance, (int, float)) or not self.tolerance >= 0:
            raise ValueError(f"tolerance={self.tolerance!r} is no number of at least 0")

    def rejects(self) -> bool:
        """What `rejection_func` says of the result.

        Raises:
            TypeError: naming `rejection_func`: it gave no truth value.
        """
        said = self.rejection_func(self.result)
        try:
            return bool(said)
        except (RuntimeError, ValueError) as error:
            raise TypeError(f"rejection_func gave {said!r}, which is not one truth value") from error

    def difference(self, first: results.Result) -> float:
        """How far the result is from that of the first run."""
        return results.difference(self.comparison_func, first, self.result)

    def reproduces(self, first: results.Result) -> bool:
        """Whether it is the same within the tolerance."""
        return self.difference(first) <= self.tolerance
