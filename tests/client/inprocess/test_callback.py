"""How a callback of the wrapper is called."""

from __future__ import annotations

import pytest

from ft_client.inprocess.abort import Abort
from ft_client.inprocess.callback import Callback, called
from ft_client.inprocess.completion import Completion
from ft_client.inprocess.finalize import Finalize
from ft_client.inprocess.health_check import HealthCheck
from ft_client.inprocess.initialize import Initialize
from ft_client.inprocess.state import FrozenState, State
from ft_client.inprocess.terminate import Terminate

STATE = State(1, 4).freeze()


@pytest.mark.parametrize("kind", [Initialize, Finalize, HealthCheck, Completion, Terminate, Abort])
def test_the_base_classes_are_abstract(kind: type[Callback]) -> None:
    with pytest.raises(TypeError, match="abstract"):
        kind()

    class Own(kind):  # type: ignore[misc, valid-type]
        def __call__(self, state: FrozenState) -> FrozenState:
            return state

    assert called("any", Own(), STATE) is STATE


def test_no_callback() -> None:
    assert called("finalize", None, STATE) is STATE


@pytest.mark.parametrize("result", [None, 3, State(1, 4)])
def test_a_callback_that_returns_something_else(result: object) -> None:
    with pytest.raises(TypeError, match="finalize returned"):
        called("finalize", lambda state: result, STATE)


def test_what_it_raises_passes() -> None:
    def leave(state: FrozenState) -> FrozenState:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        called("initialize", leave, STATE)
