"""Several callbacks as one: their order, what passes between them, and the class of the result."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from ft_client.inprocess.callback import Callback
from ft_client.inprocess.compose import Compose
from ft_client.inprocess.health_check import CudaHealthCheck, FaultCounter, HealthCheck
from ft_client.inprocess.initialize import Initialize, RetryController
from ft_client.inprocess.rank_assignment import (
    ActivateAllRanks,
    FillGaps,
    MaxActiveWorldSize,
    RankAssignment,
    RankFilter,
    ShiftRanks,
    Tree,
)


class Left(abc.ABC):  # noqa: B024
    pass


class Right(Left):
    def __init__(self, needed: int) -> None:
        self.needed = needed

    def __call__(self, value: int) -> int:
        return value + self.needed


@pytest.mark.parametrize(
    ("parts", "args", "result"),
    [
        ([lambda x: x + 1], (1,), 2),
        ([lambda x: x + "a", lambda x: x + "b", lambda x: x + "c"], ("",), "cba"),
        ([lambda x, y: x - y, lambda x: (x, 1)], (5,), 4),
        ([lambda x, y: (y, x), lambda x, y: (x, y)], (1, 2), (2, 1)),
        ([lambda: 7], (), 7),
        ([lambda x: None], (1,), None),
        ([Right(1), Right(2)], (3,), 6),
    ],
)
def test_last_to_first(parts: list[Callable[..., Any]], args: tuple[Any, ...], result: object) -> None:
    assert Compose(*parts)(*args) == result


@pytest.mark.parametrize(
    ("parts", "base", "too_close"),
    [
        ([FaultCounter(), CudaHealthCheck()], HealthCheck, FaultCounter),
        ([FaultCounter(), FaultCounter()], FaultCounter, Initialize),
        ([FaultCounter(), RetryController()], Callback, HealthCheck),
        ([ActivateAllRanks(), ShiftRanks()], RankAssignment, RankFilter),
        ([ActivateAllRanks(), MaxActiveWorldSize(4)], RankFilter, ActivateAllRanks),
        ([Compose(MaxActiveWorldSize(4), ShiftRanks()), FillGaps()], RankAssignment, Tree),
        ([Compose(FaultCounter()), Compose(CudaHealthCheck())], HealthCheck, CudaHealthCheck),
        ([lambda x: x, FaultCounter()], object, Callback),
        ([lambda x: x, lambda x: x], object, Callback),
        ([Right(1), Right(2)], Right, Callback),
        ([len, abs], object, Callback),
    ],
)
def test_the_closest_base(parts: list[Callable[..., Any]], base: type, too_close: type) -> None:
    composed = Compose(*parts)
    assert isinstance(composed, base) and isinstance(composed, Compose)
    assert not isinstance(composed, too_close)


def test_a_composition_within_a_composition() -> None:
    assert Compose(Compose(Right(1), Right(2)), Right(3)).instances[1].needed == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("parts", [[], [1], [Right], [None, Right(1)]])
def test_what_cannot_be_composed(parts: list[Any]) -> None:
    with pytest.raises(TypeError, match="Compose"):
        Compose(*parts)


def test_callbacks_without_arguments() -> None:
    calls: list[str] = []
    assert Compose(lambda: calls.append("first"), lambda: calls.append("second"))() is None
    assert calls == ["second", "first"]


def test_what_is_returned_is_passed_on_also_when_it_is_none() -> None:
    given: list[object] = []

    def forgetful(x: object) -> None:
        given.append(x)

    with pytest.warns(UserWarning, match="forgetful.* returned None") as caught:
        assert Compose(forgetful, forgetful)(1) is None
    assert (given, len(caught)) == ([1, None], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Compose(lambda x: x, lambda x: x)(None) is None
