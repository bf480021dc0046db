"""One call of a wrapped function on this rank: does what the restart machine says, in the main thread.

The machine decides (`machine.py`), the watcher brings the news of all ranks (`feed.py`), the keys in the store have
their meaning in `rank_monitor.contract.iteration`. How the ranks found each other is not known here.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import distributed

from ft_client.inprocess import absent, feed, restarter_report
from ft_client.inprocess.abort import cut_connections, forget_groups
from ft_client.inprocess.arguments import Arguments
from ft_client.inprocess.assigning import Assigning
from ft_client.inprocess.assignment import RankDiscarded
from ft_client.inprocess.attribution import Interruption, InterruptionRecord
from ft_client.inprocess.call_wrapper import CallWrapper
from ft_client.inprocess.callback import BrokenCallback, called
from ft_client.inprocess.coordination import Coordination
from ft_client.inprocess.exception import InternalError, RestartAbort
from ft_client.inprocess.failure import below_ours, let_go, was_never_called
from ft_client.inprocess.feed import Feed
from ft_client.inprocess.gather import GatherAbandoned
from ft_client.inprocess.guard import Guard
from ft_client.inprocess.interrupt import Interrupted, Interrupter
from ft_client.inprocess.iteration_environment import IterationEnvironment, Master
from ft_client.inprocess.machine import ENDS, Action, Event, Phase, step
from ft_client.inprocess.state import Mode, State
from rank_monitor.contract.departure import depart
from rank_monitor.contract.iteration import Closed, Iteration, discarded, tidy
from rank_monitor.contract.roll import Entry

logger = logging.getLogger("ft_client.inprocess")


class Call:
    """One call.

    Args:
        arguments: of the wrapper.
        function: the user's, with its arguments.
        coordination: where the ranks meet.
        state: of this rank at entry; changed in place.
        closed: for a rank that was let in at a restart: how the iteration before ended.
        guard: the link to the monitor.
    """

    def __init__(
        self,
        arguments: Arguments,
        function: Callable[[CallWrapper], Any],
        coordination: Coordination,
        state: State,
        closed: Closed | None,
        guard: Guard,
    ) -> None:
        self._arguments, self._function, self._coordination = arguments, function, coordination
        self._state, self._closed, self._guard = state, closed, guard
        self._member = state.rank or 0
        self._all_members = state.world_size
        if state.initial_rank is not None:
            self._member, self._all_members = state.initial_rank, state.initial_world_size or state.world_size
        self._store = coordination.store
        self._assigning = Assigning(arguments.assignment, coordination.store, coordination.watched)
        self._wrapper = CallWrapper(state, guard)
        self._environment = IterationEnvironment()
        self._interrupter = Interrupter()
        first = state.iteration + (closed is not None)
        self._feed = Feed(coordination.watched, first, self._member, self._interrupt)
        self._master: Master | None = None
        self._note = ""
        self._faulted = -1
        self._result: Any = None
        self._error: BaseException | None = None
        self._cause: BaseException | None = None
        self._abort_ended: BaseException | None = None
        self._is_over = False

    def run(self) -> Any:
        """What the function returned on this rank in the iteration that all completed; None on a spare.

        Raises:
            BaseException: what ended this rank's part.
        """
        self._feed.start()
        restarter_report.send_to(self._tell)
        try:
            phase, event = self._play()
        finally:
            self._is_over = True
            restarter_report.send_to(None)
            self._environment.restore()
            self._interrupter.close()
        if phase is Phase.DONE:
            return self._result
        error = self._error or InternalError(f"the wrapper ends after {event.name}")
        raise error if error is self._cause or error.__cause__ else self._chained(error)

    def _play(self) -> tuple[Phase, Event]:
        """The end, and what brought it about.

        What goes wrong in the wrapper itself, or is raised there by the handler of a signal, ends this rank's part.
        """
        phase, event = Phase.CLOSING, Event.CLOSED
        while phase not in ENDS:
            try:
                phase, actions = step(phase, event)
                for action in actions:
                    event = self._do(action)
                    if event in (Event.ENDED, Event.LOST):
                        break
            except BaseException as error:
                if phase in ENDS:
                    raise
                event = self._ended_by(error)
                if isinstance(error, distributed.DistNetworkError):
                    self._error = InternalError(f"the store of the coordination is lost: {error}")
                    event = Event.LOST
        return phase, event

    def _chained(self, error: BaseException) -> BaseException:
        error.__cause__ = self._cause
        return error

    @property
    def _iteration(self) -> Iteration:
        return Iteration(self._store, self._state.iteration)

    def _do(self, action: Action) -> Event:
        method: Callable[[], Event] = getattr(self, f"_{action.name.lower()}")
        return method()

    # Before the function.

    def _assign(self) -> Event:
        """The new numbers of this rank, and the next iteration."""
        try:
            self._assigning.assign(self._state, self._closed)
        except RankDiscarded as error:
            self._error = error
            return Event.DISCARDED
        except GatherAbandoned:
            return Event.INTERRUPTED
        except BaseException as error:
            return self._ended_by(error)
        return Event.ASSIGNED

    def _arrive(self) -> Event:
        state = self._state
        self._interrupter.reset()
        self._wrapper.begin()
        self._master = Master(self._coordination.towards) if state.active_rank == 0 else None
        self._iteration.arrive(self._entry(), self._master.note if self._master else None)
        return self._next(self._arguments.barrier_timeout.total_seconds())

    def _prepare(self) -> Event:
        state = self._state
        state.fn_exception = None
        self._assigning.tidy(state.rank == 0)
        if state.rank == 0:  # everybody has come here: nobody reads what is older than the end of the last
            tidy(self._store, state.iteration)
        self._environment.set(state, self._note)
        if state.iteration:
            self._tell("handling_completed")
        self._guard.running()
        try:
            self._interrupter.call(self._callbacks_before)
        except Interrupted:
            return Event.INTERRUPTED
        except BaseException as error:
            return self._failed_by(error)
        return Event.READY if state.mode is Mode.ACTIVE else Event.SPARE

    def _callbacks_before(self) -> None:
        frozen = self._state.freeze()
        called("initialize", self._arguments.initialize, frozen)
        called("health_check", self._arguments.health_check, frozen)

    # The function.

    def _run(self) -> Event:
        try:
            self._result = self._interrupter.call(lambda: self._function(self._wrapper))
        except Interrupted:
            return Event.INTERRUPTED
        except BaseException as error:
            return self._failed_by(error)
        return Event.RETURNED

    def _announce(self) -> Event:
        self._guard.restarting()
        self._iteration.announce_return(self._entry(), self._state.active_world_size or 0)
        return self._next(self._arguments.completion_timeout.total_seconds())

    def _wait(self) -> Event:
        self._guard.restarting()
        return self._next(None)

    def _complete(self) -> Event:
        called("completion", self._arguments.completion, self._state.freeze())
        self._guard.over()
        self._tell("finalized")
        self._feed.join()
        return Event.DONE

    # A fault.

    def _tell(self, state: str) -> None:
        """Tells the monitor, and through it the launcher."""
        self._guard.report(
            state, self._member, self._state.iteration, self._coordination.prefix, self._arguments.restart_limit_s
        )

    def _report(self) -> Event:
        self._iteration.interrupt(self._record(Interruption.EXCEPTION))
        return Event.FAILED

    def _record(self, interruption: Interruption) -> str:
        return InterruptionRecord(self._state.rank or 0, interruption).to_json()

    def _recover(self) -> Event:
        self._guard.restarting()
        self._tell("handling_starting")
        arguments, number = self._arguments, self._state.iteration
        within_s = (arguments.last_call_wait + arguments.barrier_timeout).total_seconds()
        deadline = time.monotonic() + within_s
        while self._faulted < number:
            event = self._next(deadline - time.monotonic())
            if event is Event.LATE:
                self._error = InternalError(f"the abort took longer than {within_s:g} s")
            if event in (Event.LATE, Event.LOST, Event.DONE):
                return event
        self._result = None
        if self._abort_ended is not None:
            self._ended_by(self._abort_ended)
            return Event.FAILED
        if arguments.abort is not None:
            forget_groups()
        frozen = self._state.freeze()
        try:
            called("finalize", arguments.finalize, frozen)
            called("health_check", arguments.health_check, frozen)
        except BaseException as error:
            self._ended_by(error)
            return Event.FAILED
        return Event.RECOVERED

    def _account(self) -> Event:
        self._iteration.account(self._entry())
        return self._next(self._arguments.barrier_timeout.total_seconds())

    def soft_timeout(self, reason: str) -> None:
        """The monitor sees no progress here. Called in another thread."""
        logger.warning("rank %s: %s: interrupting", self._state.rank, reason)
        self._iteration.interrupt(self._record(Interruption.SOFT_TIMEOUT))

    def _interrupt(self) -> None:
        """Frees the main thread and interrupts it. Called in the watcher's thread."""
        self._guard.fault_seen()
        self._assigning.abandon(self._feed.known_fault)
        time.sleep(self._arguments.last_call_wait.total_seconds())
        if self._is_over:  # this rank left before the others came to an end
            return
        with self._wrapper.atomic():
            try:
                called("abort", self._arguments.abort, self._state.freeze())
            except BaseException as error:
                logger.exception("rank %s: abort failed", self._state.rank)
                self._abort_ended = None if isinstance(error, Exception) else error
            again = (lambda: None) if self._arguments.abort is None else cut_connections
            self._interrupter.interrupt(again)

    # Others that do not come.

    def _interrupt_for_absent(self) -> Event:
        absent.expel(self._iteration, self._iteration.start, self._all_members)
        return self._next(self._arguments.barrier_timeout.total_seconds())

    def _expel(self) -> Event:
        absent.expel(self._iteration, self._iteration.end, self._all_members)
        return self._next(self._arguments.barrier_timeout.total_seconds())

    def _interrupt_for_unfinished(self) -> Event:
        absent.interrupt_for_unfinished(self._iteration, self._state.active_world_size or 0)
        return self._next(self._arguments.barrier_timeout.total_seconds())

    # Leaving.

    def _discard(self) -> Event:
        self._feed.stopped = True
        iteration = self._iteration
        discarded(self._store).sign(Entry(self._member))
        out = {entry.member for entry in discarded(self._store).entries()}
        if out.issuperset(iteration.everybody(self._all_members)):  # nobody comes, so nobody else releases the start
            iteration.interrupt(self._record(Interruption.BASE_EXCEPTION))
        return self._leave()

    def _depart(self) -> Event:
        """Tells the others; they close the iteration meanwhile."""
        record = self._record(Interruption.BASE_EXCEPTION)
        timeout_s = self._arguments.barrier_timeout.total_seconds()
        telling = threading.Thread(target=self._tell_departure, args=(record, timeout_s), daemon=True)
        telling.start()
        event = self._leave()
        telling.join()
        return event

    def _tell_departure(self, record: str, timeout_s: float) -> None:
        try:
            depart(self._store, self._member, record, timeout_s, self._assigning.undecided, by_itself=True)
        except Exception as problem:
            logger.warning("the others may not know that rank %d leaves: %s", self._member, problem)

    def _leave(self) -> Event:
        state = self._state
        self._guard.restarting()
        self._feed.stopped = True
        state.mode, state.rank, state.active_rank = Mode.TERMINATED, None, None
        try:
            called("terminate", self._arguments.terminate, state.freeze())
        except BaseException as error:
            logger.exception("terminate failed")
            self._error = self._error if isinstance(error, Exception) else error
        self._feed.join(self._arguments.barrier_timeout.total_seconds())
        self._tell("aborted" if isinstance(self._error, RestartAbort) else "left")
        self._guard.over()
        return Event.ENDED

    # Within.

    def _entry(self) -> Entry:
        return Entry(self._member, self._state.rank or 0, self._state.world_size)

    def _failed_by(self, error: BaseException) -> Event:
        """A fault that restarts, or one that ends this rank."""
        if isinstance(error, BrokenCallback) or not isinstance(error, Exception) or was_never_called(error):
            return self._ended_by(error)
        state = self._state
        is_own = self._feed.known_fault < state.iteration
        if is_own:
            told = (type(error), error, below_ours(error.__traceback__))
            logger.error("rank %s, iteration %d: the function failed", state.rank, state.iteration, exc_info=told)
        else:
            logger.info("rank %s: failed in consequence: %s: %s", state.rank, type(error).__name__, error)
        let_go(error)
        self._cause = error
        state.fn_exception = error if is_own else None
        return Event.FAILED

    def _ended_by(self, error: BaseException) -> Event:
        self._error = error
        return Event.ENDED

    def _next(self, timeout_s: float | None) -> Event:
        """Waits for news; None: as long as it takes."""
        try:
            news = self._feed.news.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        except queue.Empty:
            return Event.LATE
        match news:
            case feed.Started(_, note):
                self._note = note
                return Event.STARTED
            case feed.Fault(number):
                self._faulted = number
                return Event.INTERRUPTED
            case feed.Done():
                return Event.DONE
            case Closed() as closed:
                self._closed = closed
                if closed.has(self._member):
                    return Event.CLOSED
                self._error = RankDiscarded(f"the others went on without rank {self._state.rank}")
                return Event.EXCLUDED
            case feed.Lost(problem):
                self._error = InternalError(f"the store of the coordination is lost: {problem}")
                return Event.LOST
