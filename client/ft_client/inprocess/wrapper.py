"""`Wrapper` has a function called again on every rank, in the same processes, after a fault on any rank.

Users make a `Wrapper`. It checks its arguments, connects this rank to the ranks' store (`restart/coordination.py`) and
hands over to `restart/call.py`, which runs the call. `restart/machine.py` explains how a restart goes.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import distributed

from ft_client.inprocess.abort import AbortTorchDistributed
from ft_client.inprocess.arguments import Arguments
from ft_client.inprocess.call_wrapper import CallParameters, CallWrapper
from ft_client.inprocess.exception import HungAgain
from ft_client.inprocess.restart.call import Call
from ft_client.inprocess.restart.coordination import Coordination, is_respawned, join, meet
from ft_client.inprocess.restart.monitor_link import MonitorLink
from ft_client.inprocess.restart.nccl_warnings import nccl_warnings
from ft_client.inprocess.state import State
from ft_client.inprocess.store import TCPStore
from rank_monitor.contract import env
from rank_monitor.contract.restart_phase import RestartPhase

_T = TypeVar("_T")
_LOGGER = "ft_client.inprocess"


class Wrapper:
    """Decorates a function such that faults restart it in process, on all ranks.

    Example, in a script that `ft_launcher` or torchrun starts:

        @Wrapper(initialize=RetryController(max_iterations=5), health_check=CudaHealthCheck())
        def train(call_wrapper: CallWrapper | None = None) -> float:
            torch.distributed.init_process_group("nccl")    # in each round anew
            ...

        train()

    The process group must be made inside the function: a restart destroys all groups.

    Args:
        **arguments: see `Arguments` for names, types and defaults; by keyword only. Durations are timedeltas.
            `store_factory` defaults to `TCPStore`, `abort` to `AbortTorchDistributed()`.

    Raises:
        TypeError: an argument is unknown or has the wrong type; the text names it.
        ValueError: a relation between two durations is violated; the text has both.
    """

    _is_in_call = False

    def __init__(self, **arguments: Any) -> None:
        defaults = {"store_factory": TCPStore, "abort": AbortTorchDistributed()}
        self.arguments = Arguments(**{**defaults, **arguments})
        self._make_store = functools.partial(self.arguments.store_factory, **self.arguments.store_kwargs)

    def __call__(self, function: Callable[..., _T]) -> Callable[..., _T | None]:
        """Returns the function, wrapped: a function that returns the result of this rank, or None on a spare.

        With `enabled=False` the function itself is returned.

        Calling the wrapped function raises:
            RuntimeError: this is not the main thread, a wrapped function calls it, or the store cannot be reached.
            TypeError: the arguments do not fit the function.
            ValueError: torch.distributed is initialised already; RANK or WORLD_SIZE is missing or invalid.
            RankDiscarded, RestartAbort, BaseException: what ended this rank's part. Without a launcher the process of a
                rank that hung again and again ends by SIGTERM; the call raises only where the program survives that.
        """
        if not callable(function):
            raise TypeError(f"{function!r} is not a function")
        if not self.arguments.enabled:
            return function
        parameters = CallParameters(function)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> _T | None:
            # Arguments that do not fit the function fail here, once, and not in every round.
            parameters.bind(None, args, kwargs)

            def once(wrapper: CallWrapper) -> _T:
                bound, named = parameters.bind(wrapper, args, kwargs)
                return function(*bound, **named)

            result: _T | None = self._call(once)
            return result

        return wrapped

    def _call(self, function: Callable[[CallWrapper], Any]) -> Any:
        """Makes one call of the wrapped function. Blocks until the call has ended on this rank.

        Connects to the ranks' store, logs warnings about NCCL, and runs the call. Where the function hung again after
        each restart, the process ends.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "a wrapped function is to be called in the main thread, which is the one that is interrupted"
            )
        if distributed.is_available() and distributed.is_initialized():
            raise ValueError(
                "not torch.distributed.is_initialized() must hold: call the wrapped function before, and let it do that"
            )
        if Wrapper._is_in_call:
            raise RuntimeError("a wrapped function cannot be called by one: its ranks would be those of one round")
        state = State.from_env(os.environ)
        with one_handler(logging.getLogger(_LOGGER)) as log:
            for warning in nccl_warnings(
                os.environ, _nccl_version(), torch.__version__, self.arguments, _collective_timeout()
            ):
                log.warning("%s", warning)
            coordination = meet(self.arguments, self._make_store, state)
            log.debug("rank %s of %s: a wrapped call begins", state.initial_rank, state.initial_world_size)
            Wrapper._is_in_call = True
            try:
                return self._call_at(coordination, function, state)
            except HungAgain as hung:
                coordination.close()
                end_as_hung(hung, log)
                raise
            finally:
                Wrapper._is_in_call = False
                coordination.close()
                log.debug("rank %s of %s: the wrapped call has ended", state.initial_rank, state.initial_world_size)

    def _call_at(self, coordination: Coordination, function: Callable[[CallWrapper], Any], state: State) -> Any:
        """Runs the call over the stores of `coordination`. A rank that was started again alone joins first.

        The link to the monitor comes before the call, since a rank that joins reports its phase by it. A request of the
        monitor that comes before there is a call is dropped: nothing runs yet that could hang.
        """
        call: Call | None = None

        def interrupted(reason: str) -> None:
            if call is not None:
                call.soft_timeout(reason)

        link = MonitorLink(
            self.arguments,
            interrupted=interrupted,
            entry_rank=state.rank or 0,
            call_prefix=coordination.call_prefix,
            logfile=coordination.logfile,
        )
        closed = None
        if is_respawned():
            link.report(RestartPhase.JOINING, 0)
            closed = join(coordination.watched, state)
            if closed is None:  # the function was done on all ranks before
                link.over(RestartPhase.DONE, 0)
                return None
        call = Call(self.arguments, function, coordination, state, closed=closed, link=link)
        try:
            return call.run()
        finally:
            # The link keeps `interrupted`, which keeps this variable: the call's connections to the store must end.
            call = None


def _nccl_version() -> tuple[int, ...] | None:
    """Returns the version of NCCL; None where NCCL cannot be used."""
    if not (torch.cuda.is_available() and distributed.is_nccl_available()):
        return None
    return tuple(torch.cuda.nccl.version())


def _collective_timeout() -> datetime.timedelta | None:
    """Returns the timeout of NCCL groups that are made without one of their own; None: not known."""
    known = distributed.is_available() and distributed.distributed_c10d.default_pg_nccl_timeout
    return known or None


def end_as_hung(error: HungAgain, log: logging.Logger) -> None:
    """Ends this process by SIGTERM, as `hard_timeout` does, where there is no launcher. Returns if it survives that.

    Each interruption freed the main thread, and each time the function hung again, so another process must take the
    place of this one. The parent process sees by the signal that this process hung. Under a launcher the rank gets a
    fresh process anyway, so nothing is done here.
    """
    if env.IN_PROCESS_LIMITS in os.environ:
        return
    log.error("%s: this process ends by SIGTERM, as after hard_timeout", error)
    signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def one_handler(logger: logging.Logger) -> Iterator[logging.Logger]:
    """Returns a context in which `logger` writes to one stream: that of the first ancestor that writes to one.

    Several ancestors may have a handler: each line would appear once for each of them.
    """
    if logger.handlers:
        handler = None
    else:
        handler = _handler_above(logger)
    if handler is None:
        yield logger
        return
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield logger
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def _handler_above(logger: logging.Logger) -> logging.Handler | None:
    """Returns the first stream handler of an ancestor of `logger`; None: no ancestor writes to a stream."""
    ancestor = logger.parent
    while ancestor is not None:
        for handler in ancestor.handlers:
            if type(handler) is logging.StreamHandler:
                return handler
        ancestor = ancestor.parent
    return None
