"""The base class of the wrapper's callbacks, and the ways in which they are called.

`restart/user_function.py` calls the callbacks; the restart machine decides when.

Threads: the main thread calls most callbacks itself, and the monitor limits them. Aborts, CUDA health checks and
threaded finalizers may hang in a library: they run in a daemon thread of their own (`in_thread`, `call_within`), for
which the caller stops waiting after a timeout. A thread that hangs is left behind, since no thread can be ended from
outside; it may still touch torch's process groups and the GPU.
"""

from __future__ import annotations

import abc
import datetime
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from ft_client.inprocess.exception import TimeoutError
from ft_client.inprocess.state import FrozenState

logger = logging.getLogger("ft_client.inprocess")

_T = TypeVar("_T")
_reported: set[str] = set()
"""Arguments whose callback returned something else than a state: reported once, not in each round."""


class Callback(abc.ABC):
    """The base class of all callbacks: called with the state of the rank, which it returns for the next in a `Compose`.

    Users derive from one of its subclasses (`Initialize`, `Abort`, `Finalize`, `HealthCheck`, `Completion`,
    `Terminate`), or give any function with this signature.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Does its work and returns `state`."""


def called(name: str, callback: Callable[[FrozenState], object] | None, state: FrozenState) -> None:
    """Calls the callback that was given as argument `name` of the wrapper, if there is one. In the calling thread.

    The returned state matters to a `Compose` only. Anything else than a state is logged, once for each argument, since
    it is most likely a forgotten `return state`.

    Raises:
        BaseException: whatever the callback raises.
    """
    if callback is None:
        return
    result = callback(state)
    if not isinstance(result, FrozenState) and name not in _reported:
        _reported.add(name)
        logger.warning("%s returned %r; a callback returns the state that it was given", name, result)


def in_thread(function: Callable[[], _T], what: str) -> Future[_T]:
    """Calls `function` in a new daemon thread named `what`. Does not block.

    Returns:
        A future that gets the result of `function`, or the exception that it raised.
    """
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

    Args:
        timeout: how long to wait.
        function: what to call. Its thread gets the caller's CUDA device, since the device is a property of a thread.
        what: the thread's name, for the error.

    Raises:
        TimeoutError: the one of `inprocess.exception`, naming `what`; the thread goes on.
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
    """Returns the CUDA device of the calling thread; None when CUDA is not in use. Never initializes CUDA."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return int(cuda.current_device())
    return None
