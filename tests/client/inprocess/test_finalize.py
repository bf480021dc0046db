"""A function in a thread of its own: its end, its failure, its deadline."""

from __future__ import annotations

import datetime
import threading

import pytest

from ft_client.inprocess import exception
from ft_client.inprocess.finalize import ThreadedFinalize
from ft_client.inprocess.state import State
from tests.program import python

STATE = State(1, 4).freeze()
LONG, SHORT = datetime.timedelta(seconds=60), datetime.timedelta(milliseconds=20)


def test_it_runs_in_another_thread() -> None:
    seen = []

    def fn(*args: int, **kwargs: int) -> str:
        seen.append((threading.current_thread(), args, kwargs))
        return "ignored"

    assert ThreadedFinalize(LONG, fn, (1, 2), {"third": 3})(STATE) is STATE
    assert ThreadedFinalize(LONG, fn, args=None)(STATE) is STATE
    (thread, args, kwargs), (_, no_args, no_kwargs) = seen
    assert thread is not threading.current_thread() and thread.daemon
    assert (args, kwargs, no_args, no_kwargs) == ((1, 2), {"third": 3}, (), {})


@pytest.mark.parametrize("error", [ValueError("x"), TimeoutError("of the function"), SystemExit(3)])
def test_what_it_raises_passes(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        ThreadedFinalize(LONG, fail)(STATE)
    assert raised.value is error


def test_it_takes_too_long() -> None:
    go = threading.Event()
    with pytest.raises(exception.TimeoutError, match=r"finalize .*wait.* took longer than 0.02 s"):
        ThreadedFinalize(SHORT, go.wait)(STATE)
    go.set()


def test_a_thread_that_hangs_does_not_hold_up_the_exit() -> None:
    code = """
import datetime, threading
from ft_client.inprocess.exception import TimeoutError
from ft_client.inprocess.finalize import ThreadedFinalize
from ft_client.inprocess.state import State
try:
    ThreadedFinalize(datetime.timedelta(milliseconds=20), threading.Event().wait)(State(0, 1).freeze())
except TimeoutError:
    print("late")
"""
    assert python(code).stdout == "late\n"
