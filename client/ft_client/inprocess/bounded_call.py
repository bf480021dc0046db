"""Calls a function in a thread of its own; `call_within` stops waiting for it after a timeout.

Aborts, health checks and finalizers use it, since each may hang in a library. A function that hangs is left alone: no
thread can be ended from outside.
"""

from __future__ import annotations

import datetime
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from ft_client.inprocess.exception import TimeoutError

_T = TypeVar("_T")


def in_thread(function: Callable[[], _T], what: str) -> Future[_T]:
    """Calls `function` in a daemon thread named `what`. Returns what gets its result or exception. Does not block."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    return future


def call_within(timeout: datetime.timedelta, function: Callable[[], _T], what: str) -> _T:
    """Calls `function` in a thread on the caller's CUDA device, and returns its result. Blocks up to `timeout`.

    Raises:
        TimeoutError: of `inprocess.exception`, naming `what`; the thread goes on.
        BaseException: what `function` raises.
    """
    device = _cuda_device()

    def on_device() -> _T:
        if device is not None:
            sys.modules["torch"].cuda.set_device(device)
        return function()

    future = in_thread(on_device, what)
    if not wait([future], timeout.total_seconds()).done:
        raise TimeoutError(f"{what} took longer than {timeout.total_seconds():g} s")
    return future.result()


def _cuda_device() -> int | None:
    """The caller's device, which is a property of the thread; None when CUDA is not in use."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return int(cuda.current_device())
    return None
