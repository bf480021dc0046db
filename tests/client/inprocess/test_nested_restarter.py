"""Callbacks of NVIDIA's names: each can be composed with callbacks of its kind, and does nothing."""

from __future__ import annotations

import pytest

from ft_client.inprocess.abort import Abort
from ft_client.inprocess.callback import Callback
from ft_client.inprocess.completion import Completion
from ft_client.inprocess.initialize import Initialize
from ft_client.inprocess.nested_restarter import (
    NestedRestarterAborted,
    NestedRestarterFinalized,
    NestedRestarterHandlingCompleted,
    NestedRestarterHandlingStarting,
)
from ft_client.inprocess.state import State
from ft_client.inprocess.terminate import Terminate

STATE = State(1, 4).freeze()


@pytest.mark.parametrize(
    ("callback", "kind"),
    [
        (NestedRestarterHandlingStarting(), Abort),
        (NestedRestarterHandlingCompleted(), Initialize),
        (NestedRestarterHandlingCompleted(special_rank=3), Initialize),
        (NestedRestarterFinalized(), Completion),
        (NestedRestarterAborted(), Terminate),
    ],
)
def test_each_is_of_its_kind_and_returns_the_state(callback: Callback, kind: type[Callback]) -> None:
    assert isinstance(callback, kind)
    assert callback(STATE) is STATE
