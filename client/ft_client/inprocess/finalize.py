"""Callbacks that run after a fault, before the health check, to prepare the process for another round.

Users give one to the wrapper as `finalize`, to free memory or to end threads and loaders, for instance.
`restart/user_function.py` calls it in the main thread, in phase FINALIZING, where the monitor's limit is
`hard_timeout`. It must not use a process group: all of them are aborted by then.
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
    """Calls a function in a thread of its own, for at most `timeout`. The thread has the caller's CUDA device.

    Example: `Wrapper(finalize=ThreadedFinalize(datetime.timedelta(seconds=10), torch.cuda.empty_cache))`

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
