"""Importing the package costs nothing; every public name is there when asked for; what a handler of a class catches."""

from __future__ import annotations

import builtins

import pytest

from ft_client import inprocess
from ft_client.inprocess import exception
from ft_client.inprocess.health_check import FaultCounterExceeded
from ft_client.inprocess.rank_assignment import RankDiscarded
from tests.program import python


def test_no_torch_until_it_is_needed() -> None:
    code = """
import sys
import ft_client.inprocess as inprocess
assert not [name for name in sys.modules if name.startswith("ft_client.inprocess.")]
for name in set(inprocess.__all__) - {'Wrapper', 'store'}:
    getattr(inprocess, name)
inprocess.rank_assignment.Tree([inprocess.rank_assignment.Layer()])
inprocess.finalize.ThreadedFinalize, inprocess.health_check.CudaHealthCheck()
assert "torch" not in sys.modules
assert inprocess.Wrapper and inprocess.store.TCPStore
"""
    python(code)


def test_public_names() -> None:
    assert set(inprocess.__all__) <= set(dir(inprocess))
    assert inprocess.state.State is inprocess.State
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        inprocess.nothing  # noqa: B018


@pytest.mark.parametrize(
    "error",
    [exception.HealthCheckError, exception.InternalError, exception.TimeoutError, RankDiscarded, FaultCounterExceeded],
)
def test_errors_of_the_restart(error: type[BaseException]) -> None:
    assert error.__mro__[1] is exception.RestartError and exception.RestartError.__mro__[1] is Exception


def test_an_abort_is_no_exception() -> None:
    assert exception.RestartAbort.__mro__[1] is BaseException
    assert not issubclass(exception.TimeoutError, builtins.TimeoutError)
