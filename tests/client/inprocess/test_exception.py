"""What a handler of one class catches."""

from __future__ import annotations

import builtins

import pytest

from ft_client.inprocess import exception
from ft_client.inprocess.health_check import FaultCounterExceeded
from ft_client.inprocess.rank_assignment import RankDiscarded


@pytest.mark.parametrize(
    "error",
    [exception.HealthCheckError, exception.InternalError, exception.TimeoutError, RankDiscarded, FaultCounterExceeded],
)
def test_errors_of_the_restart(error: type[BaseException]) -> None:
    assert error.__mro__[1] is exception.RestartError and exception.RestartError.__mro__[1] is Exception


def test_an_abort_is_no_exception() -> None:
    assert exception.RestartAbort.__mro__[1] is BaseException
    assert not issubclass(exception.TimeoutError, builtins.TimeoutError)
