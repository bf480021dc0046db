"""Calls and interrupts the user's function and callbacks in a call on this rank, and keeps what ended them.

`call.py` makes one `UserFunction` for each call. Each step of the call ends with an event of the restart machine. This
file knows no store and no other rank.

Threads: the main thread calls everything but `interrupt`. The watcher's thread calls `interrupt`, which blocks until
the main thread is out of the user's code. An abort has a thread of its own, which is left behind at `hard_timeout`: a
library may hang in it, and no thread can be ended from outside.

Exceptions keep frames alive, and frames keep models, groups and stores. So everything here that stores an exception
says for how long, and drops the frames of the user's function before the next round makes another model.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from concurrent.futures import wait
from types import TracebackType
from typing import Any

from ft_client.inprocess import gloo_connections
from ft_client.inprocess.abort import cut_again, reset_groups
from ft_client.inprocess.arguments import Arguments, OnState
from ft_client.inprocess.attribution import LastInterruption
from ft_client.inprocess.call_wrapper import CallWrapper
from ft_client.inprocess.callback import called, in_thread
from ft_client.inprocess.exception import HealthCheckError, InternalError, RestartError
from ft_client.inprocess.restart.interrupt import Interrupted, Interrupter
from ft_client.inprocess.restart.machine import RestartEvent
from ft_client.inprocess.restart.monitor_link import MonitorLink
from ft_client.inprocess.state import FrozenState, Mode, State
from rank_monitor.contract.errors import text_of
from rank_monitor.contract.lost_peer import is_lost_peer
from rank_monitor.contract.same_error import digest

logger = logging.getLogger("ft_client.inprocess")
_WRAPPER = "ft_client.inprocess"
"""The modules of the wrapper, whose frames are above those of the user's code."""


class UserFunction:
    """The user's function and callbacks in one call, for the thread that makes the call.

    Args:
        arguments: the wrapper's arguments.
        function: the user's function, with the user's arguments bound to it.
        state: the state of this rank. What the function raised is noted in its `fn_exception`.
        link: the link to the monitor.
        end_reason_of: returns why a round ended, given its number; for `CallWrapper.last_interruption`.

    Attributes:
        known_fault: the last round that this rank knows to be interrupted. The watcher's thread sets it.
        fault: type and location of the last exception on this rank.
        fault_text: the digest of that exception's text.
        is_collateral: that exception was the consequence of a fault on another rank.
        result: what the function returned last.
        error: the exception that ends this rank.
    """

    def __init__(
        self,
        arguments: Arguments,
        function: Callable[[CallWrapper], Any],
        state: State,
        link: MonitorLink,
        end_reason_of: Callable[[int], LastInterruption],
    ) -> None:
        self.known_fault = -1
        self.fault = ""
        self.fault_text = ""
        self.is_collateral = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._arguments, self._function, self._state = arguments, function, state
        self._wrapper = CallWrapper(state, link, end_reason_of)
        self._link = link
        self._interrupter = Interrupter(link.interrupt_grace_s, self._interrupted_again)
        self._cause: BaseException | None = None
        self._abort_ended: BaseException | None = None
        self._is_over = False

    def close(self) -> None:
        """Ends the call on this rank: nothing is interrupted any more, and the signal handler is the user's again."""
        self._is_over = True
        self._wrapper.close()
        self._interrupter.close()

    def begin(self) -> None:
        """Begins a round: functions may run again.

        To be called when all ranks have recovered from the last round: connections of gloo that were cut are closed
        here, and a peer that had not read them to their end would hang (`gloo_connections.close_cut`).
        """
        gloo_connections.close_cut()
        self._interrupter.reset()
        self._wrapper.begin()

    def prepare(self) -> RestartEvent:
        """Calls `initialize` and the health check before the function.

        Returns:
            READY on an active rank, SPARE on another; or INTERRUPTED, FAILED, ENDED.
        """

        def callbacks() -> None:
            frozen = self._state.freeze()
            called("initialize", self._arguments.initialize, frozen)
            self._check_health(frozen)

        event = RestartEvent.SPARE
        if self._state.mode is Mode.ACTIVE:
            event = RestartEvent.READY
        return self._tried(callbacks, event)

    def run(self) -> RestartEvent:
        """Calls the function: the action RUN of the machine. Blocks until the function has returned, has raised, or was
        interrupted. What it returned is `result`.

        Returns:
            RETURNED; or INTERRUPTED, FAILED, ENDED.
        """
        return self._tried(lambda: self._function(self._wrapper), RestartEvent.RETURNED)

    def interrupt(self) -> None:
        """Aborts what blocks the main thread, and interrupts the main thread. Called in the watcher's thread.

        Blocks until no function of the user's runs. First waits `last_call_wait`: faults of other ranks within that
        time are written before the round ends, so that all of them are known together. Waits for `CallWrapper.atomic`
        sections: the function may be saving a checkpoint.
        """
        time.sleep(self._arguments.last_call_wait.total_seconds())
        if self._is_over:  # this rank left the call meanwhile
            return
        with self._wrapper.atomic():
            if self._arguments.abort is not None:
                self._abort(self._arguments.abort)
            # Before the report, which counts only for a function that runs already: the main thread may be on its way
            # into one. The monitor would judge that by its progress, and never end a loop that swallows interruptions.
            self._interrupter.begin()
            self._link.interrupting()
            if self._arguments.abort is None:
                self._interrupter.interrupt()
            else:
                self._interrupter.interrupt(cut_again)

    def _abort(self, abort: OnState) -> None:
        """Calls the user's `abort`, for at most `hard_timeout`.

        If `abort` takes longer or raises a `BaseException`, this rank leaves at the next `recover`: its main thread may
        be blocked still. An `Exception` of `abort` is only logged: where nothing was freed, the monitor's limits apply.
        """
        frozen = self._state.freeze()
        limit_s = self._arguments.hard_timeout.total_seconds()
        call = in_thread(lambda: called("abort", abort, frozen), "abort")
        if not wait([call], limit_s).done:
            late = f"the abort took longer than hard_timeout={limit_s:g} s"
            logger.error("rank %s: %s", self._state.rank, late)
            self._abort_ended = InternalError(late)
            return
        self._abort_ended, error = None, call.exception()
        if error is not None:
            logger.error("rank %s: abort failed", self._state.rank, exc_info=error)
            if not isinstance(error, Exception):
                self._abort_ended = error

    def recover(self) -> RestartEvent:
        """Cleans up after an interruption: resets torch's groups, calls `finalize` and the health check.

        Returns:
            RECOVERED; or FAILED, which ends this rank: `error` says why.
        """
        self.result = None
        if self._abort_ended is not None:
            return self.end_by(self._abort_ended, RestartEvent.FAILED)
        frozen = self._state.freeze()
        try:
            if self._arguments.abort is not None:
                reset_groups()
            called("finalize", self._arguments.finalize, frozen)
            self._check_health(frozen)
        except BaseException as error:
            return self.end_by(error, RestartEvent.FAILED)
        return RestartEvent.RECOVERED

    def complete(self) -> None:
        """Calls `completion`: the function is done on all ranks. What `completion` raises, this raises."""
        called("completion", self._arguments.completion, self._state.freeze())

    def terminate(self) -> None:
        """Calls `terminate`: this rank leaves. What `terminate` raises is logged, and keeps no rank from leaving."""
        self._state.mode, self._state.rank, self._state.active_rank = Mode.TERMINATED, None, None
        try:
            called("terminate", self._arguments.terminate, self._state.freeze())
        except BaseException as error:
            logger.exception("terminate failed")
            if not isinstance(error, Exception):
                self.error = error

    def end_by(self, error: BaseException, event: RestartEvent = RestartEvent.ENDED) -> RestartEvent:
        """Notes the exception that ends this rank. Returns `event`."""
        self.error = error
        return event

    def final_error(self, last: RestartEvent) -> BaseException:
        """Returns the exception that ended this rank. If it has no cause, the last failure on this rank becomes its
        cause, so that the user's log shows both.

        The exception is not kept here: its traceback refers to the call, and this cycle of references would be freed
        only by a garbage collection, with the connections to the store.

        Args:
            last: the last event.
        """
        error = self.error or InternalError(f"the wrapper ends after {last.name}")
        if error is not self._cause and error.__cause__ is None:
            error.__cause__ = self._cause
        self._reset()
        return error

    def final_result(self) -> Any:
        """Returns the function's result on this rank. Earlier failures are not kept here."""
        self._reset()
        return self.result

    def _reset(self) -> None:
        self.error = self._cause = self._state.fn_exception = None

    def _interrupted_again(self, waited_s: float, reason: str, stack: str) -> None:
        """Logs and reports that the interruption was raised again, although it may cut off a cleanup.

        Called in the watcher's thread, by `Interrupter`, after each `interrupt_grace`.
        """
        logger.warning(
            "rank %s: %.1f s after its interruption the function has not ended (%s): it is interrupted again at\n%s",
            self._state.rank,
            waited_s,
            reason,
            stack,
        )
        self._link.interrupted_again(self._state.iteration, waited_s, reason, stack)

    def _check_health(self, frozen: FrozenState) -> None:
        """Calls the user's health check. Whatever `Exception` it raises becomes a `RestartError`."""
        try:
            called("health_check", self._arguments.health_check, frozen)
        except RestartError:
            raise
        except Exception as error:
            raise HealthCheckError(f"health_check raised {type(error).__name__}: {error}") from error

    def _tried(self, piece: Callable[[], Any], event: RestartEvent) -> RestartEvent:
        """Calls `piece` such that the watcher can interrupt it. Its result is `result`.

        Returns:
            `event` when `piece` returned; or INTERRUPTED, FAILED, ENDED.
        """
        try:
            self.result = self._interrupter.call(piece)
        except Interrupted:
            return RestartEvent.INTERRUPTED
        except BaseException as error:
            return self._failed_by(error)
        return event

    def _failed_by(self, error: BaseException) -> RestartEvent:
        """Notes an exception of the user's code. Returns FAILED where it restarts the call, ENDED where it ends it.

        Only an exception that began on this rank becomes `state.fn_exception`, which `FaultCounter` counts. Two kinds
        are a consequence of a fault on another rank: one that comes after a fault is known, and one that says that a
        connection to another rank broke.
        """
        if not isinstance(error, Exception) or was_never_called(error):
            return self.end_by(error)
        state = self._state
        is_first = self.known_fault < state.iteration
        lost_peer = _is_about_lost_peer(error)
        text = f"{type(error).__name__}: {text_of(error)}"
        if not is_first:
            logger.info("rank %s: failed in consequence: %s", state.rank, text)
        elif lost_peer:
            logger.warning(
                "rank %s, round %d: a connection to another rank broke, which is not a fault of this one: %s",
                state.rank,
                state.iteration,
                text,
            )
        else:
            exc_info = (type(error), error, _below_wrapper(error.__traceback__))
            logger.error("rank %s, round %d: the function failed", state.rank, state.iteration, exc_info=exc_info)
        self.fault, self.fault_text = _place_of(error), digest(text)
        self.is_collateral = lost_peer or not is_first
        release_frames(error)
        # The wrapper's own frames refer to the call, which would live as long as the user keeps the exception.
        error.__traceback__ = _below_wrapper(error.__traceback__)
        self._cause = error
        state.fn_exception = None
        if not self.is_collateral:
            state.fn_exception = error
        return RestartEvent.FAILED


# What an exception of the function says: its origin, its cause, and the objects that it keeps alive.


def _below_wrapper(trace: TracebackType | None) -> TracebackType | None:
    """Returns the part of a traceback from the first frame of the user's code on; all of it where there is none."""
    found = trace
    while found is not None and _is_of_wrapper(found):
        found = found.tb_next
    return found or trace


def was_never_called(error: Exception) -> bool:
    """Returns whether the arguments did not fit the function.

    Such a call failed before any line of the user's code ran, and would fail in each round: a restart cannot help.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return isinstance(error, TypeError) and trace is not None and _is_of_wrapper(trace)


def _is_about_lost_peer(error: BaseException) -> bool:
    """Returns whether an exception of torch only reports that the connection to another rank broke.

    Then that rank is the cause, and not this one. The first exception in the chain of `__cause__` is examined: the
    user's code may wrap torch's exception in its own.
    """
    seen = set[int]()
    while error.__cause__ is not None and id(error) not in seen:
        seen.add(id(error))
        error = error.__cause__
    is_torchs = type(error) is RuntimeError or type(error).__module__.startswith("torch")
    return is_torchs and is_lost_peer(f"{type(error).__name__}: {text_of(error)}")


def _place_of(error: BaseException) -> str:
    """Returns the type of an exception and the file and line of its innermost frame: `ValueError at train.py:7`."""
    name, frames = type(error).__name__, traceback.extract_tb(error.__traceback__)
    if not frames:
        return name
    return f"{name} at {frames[-1].filename}:{frames[-1].lineno}"


def release_frames(error: BaseException | None) -> None:
    """Frees what the frames of an exception refer to, such as a model, before the next round makes another model.

    Without this, the GPU would hold two models while the exception is kept. The traceback keeps its lines for the log.
    """
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_of_wrapper(trace: TracebackType) -> bool:
    """Returns whether a frame belongs to a module of the wrapper."""
    name = str(trace.tb_frame.f_globals.get("__name__"))
    return name == _WRAPPER or name.startswith(f"{_WRAPPER}.")
