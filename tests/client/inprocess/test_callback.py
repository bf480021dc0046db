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
def test_the_base_classes_are_abstract(kind: type[Callback], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError, match="abstract"):
        kind()
    given: list[FrozenState] = []

    class Own(kind):  # type: ignore[misc, valid-type]
        def __call__(self, state: FrozenState) -> FrozenState:
            given.append(state)
            return state

    called("any", Own(), STATE)
    assert given == [STATE] and not caplog.records


def test_no_callback(caplog: pytest.LogCaptureFixture) -> None:
    called("finalize", None, STATE)
    assert not caplog.records


@pytest.mark.parametrize("result", [None, 3, State(1, 4)])
def test_a_callback_that_returns_something_else_is_reported_once(
    result: object, caplog: pytest.LogCaptureFixture
) -> None:
    argument = f"finalize, which returns {type(result).__name__}"  # what was reported is known to the whole process
    for _ in range(2):
        called(argument, lambda state: result, STATE)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{argument} returned {result!r}; a callback returns the state")


def test_what_it_raises_passes() -> None:
    def leave(state: FrozenState) -> FrozenState:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        called("initialize", leave, STATE)
