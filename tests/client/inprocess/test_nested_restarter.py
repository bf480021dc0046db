"""The states that callbacks report to the monitor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ft_client.inprocess import nested_restarter
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


@pytest.fixture
def reported() -> Iterator[list[str]]:
    states: list[str] = []
    nested_restarter.send_to(states.append)
    yield states
    nested_restarter.send_to(None)


@pytest.mark.parametrize(
    ("callback", "kind", "state"),
    [
        (NestedRestarterHandlingStarting(), Abort, "handling_starting"),
        (NestedRestarterHandlingCompleted(), Initialize, "handling_completed"),
        (NestedRestarterHandlingCompleted(special_rank=3), Initialize, "handling_completed"),
        (NestedRestarterFinalized(), Completion, "finalized"),
        (NestedRestarterAborted(), Terminate, "aborted"),
    ],
)
def test_each_reports_its_state(callback: Callback, kind: type[Callback], state: str, reported: list[str]) -> None:
    assert isinstance(callback, kind)
    assert callback(STATE) is STATE
    assert reported == [state]


def test_the_last_who_asked_listens(reported: list[str]) -> None:
    last: list[str] = []
    nested_restarter.send_to(last.append)
    NestedRestarterFinalized()(STATE)
    assert (reported, last) == ([], ["finalized"])


def test_nobody_listens() -> None:
    assert NestedRestarterFinalized()(STATE) is STATE
