"""A call in a thread of its own that the caller stops waiting for. Knows nothing of what is called."""

from __future__ import annotations

import datetime
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from ft_client.inprocess.exception import TimeoutError

_T = TypeVar("_T")


def call_within(timeout: datetime.timedelta, function: Callable[[], _T], what: str) -> _T:
    """What `function` returns. Its thread works on the caller's CUDA device, and never holds up the interpreter's exit.

    Raises:
        TimeoutError: of `inprocess.exception`, naming `what`; the thread goes on.
        BaseException: whatever `function` raises.
    """
    future: Future[_T] = Future()
    device = _cuda_device()

    def run() -> None:
        try:
            if device is not None:
                sys.modules["torch"].cuda.set_device(device)
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    if not wait([future], timeout.total_seconds()).done:
        raise TimeoutError(f"{what} took longer than {timeout.total_seconds():g} s")
    return future.result()


def _cuda_device() -> int | None:
    """The caller's device, which is a property of the thread; None when CUDA is not in use."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda.current_device() if cuda is not None and cuda.is_initialized() else None
