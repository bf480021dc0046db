"""Callbacks that run after a fault, before the health check, to prepare the process for another call.

`restart/user_function.py` runs the user's. They must not use a process group: all are aborted by then.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any

from ft_client.inprocess.callback import Callback, call_within
from ft_client.inprocess.state import FrozenState


class Finalize(Callback):
    """Runs after the function was interrupted and its process groups were aborted. What it raises ends this rank."""


class ThreadedFinalize(Finalize):
    """Calls a function in a thread of its own, for at most `timeout`; the thread has the caller's CUDA device.

    Args:
        timeout: how long it may take.
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """

    def __init__(
        self,
        timeout: datetime.timedelta,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.timeout, self.fn, self.args, self.kwargs = timeout, fn, args or (), kwargs or {}

    def __call__(self, state: FrozenState) -> FrozenState:
        """Returns `state`.

        Raises:
            TimeoutError: of `inprocess.exception`; the thread is left behind.
            BaseException: whatever the function raises.
        """
        call_within(self.timeout, lambda: self.fn(*self.args, **self.kwargs), f"finalize {self.fn!r}")
        return state
