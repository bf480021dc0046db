"""One call of a wrapped function on this rank: does what the restart machine says, in the main thread.

The machine decides (`machine.py`), the user's code runs in `part.py`, the watcher brings the news of all ranks
(`feed.py`), the keys in the store have their meaning in `rank_monitor.contract.iteration`. How the ranks found each
other is not known here.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import Any

from torch import distributed

from ft_client.inprocess import absent, feed, nested_restarter
from ft_client.inprocess.arguments import Arguments
from ft_client.inprocess.assigning import Assigning
from ft_client.inprocess.assignment import RankDiscarded
from ft_client.inprocess.attribution import Interruption, InterruptionRecord
from ft_client.inprocess.call_wrapper import CallWrapper
from ft_client.inprocess.coordination import Coordination
from ft_client.inprocess.escalating import Escalating, reported_iteration
from ft_client.inprocess.exception import InternalError, RestartAbort
from ft_client.inprocess.failure import in_words
from ft_client.inprocess.feed import Feed
from ft_client.inprocess.gather import GatherAbandoned
from ft_client.inprocess.guard import Guard
from ft_client.inprocess.iteration_environment import IterationEnvironment
from ft_client.inprocess.machine import ENDS, Event, Phase, step
from ft_client.inprocess.part import Part
from ft_client.inprocess.state import Mode, State
from ft_client.inprocess.store_host import own_address, serve_anywhere
from rank_monitor.contract.iteration import Closed, Iteration, tidy
from rank_monitor.contract.iteration_stores import note_of
from rank_monitor.contract.messages import NO_ITERATION
from rank_monitor.contract.roll import Entry

logger = logging.getLogger("ft_client.inprocess")
_MAX_REASON = 400


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
        self._arguments, self._coordination, self._state = arguments, coordination, state
        self._closed, self._guard = closed, guard
        self._member = state.initial_rank or 0
        self._barrier_s = arguments.barrier_timeout.total_seconds()
        self._all_members = state.initial_world_size or state.world_size
        self._store = coordination.store
        self._part = Part(arguments, function, state, guard)
        self._assigning = Assigning(arguments.assignment, coordination.store, coordination.watched)
        self._environment = IterationEnvironment()
        self._escalating = Escalating(arguments, coordination.store, guard)
        first = state.iteration + (closed is not None)
        self._feed = Feed(coordination.watched, first, self._member, self._interrupt)
        self._server: Any = None
        self._note = ""
        self._faulted = -1

    def run(self) -> Any:
        """What the function returned on this rank in the iteration that all completed; None on a spare.

        Raises:
            BaseException: what ended this rank's part.
        """
        self._feed.start()
        nested_restarter.send_to(self._tell)
        try:
            phase, event = self._play()
        finally:
            self._part.close()
            nested_restarter.send_to(None)
            self._environment.restore()
        if phase is Phase.DONE:
            return self._part.final_result()
        raise self._part.final_error(event)

    def _play(self) -> tuple[Phase, Event]:
        """The end, and what brought it about.

        What goes wrong in the wrapper itself, or is raised there by the handler of a signal, ends this rank's part.
        """
        phase, event = Phase.CLOSING, Event.CLOSED
        while phase not in ENDS:
            try:
                phase, actions = step(phase, event)
                for action in actions:
                    event = getattr(self, f"_{action.name.lower()}")()
                    if event in (Event.ENDED, Event.LOST):
                        break
            except BaseException as error:
                if phase in ENDS:
                    raise
                is_lost = isinstance(error, distributed.DistNetworkError)
                event = self._lost(error) if is_lost else self._part.end_by(error)
        return phase, event

    @property
    def _iteration(self) -> Iteration:
        return Iteration(self._store, self._state.iteration)

    # Called in other threads.

    def soft_timeout(self, reason: str) -> None:
        """The monitor sees no progress here."""
        logger.warning("rank %s: %s: interrupting", self._state.rank, reason)
        self._iteration.interrupt(self._record(Interruption.SOFT_TIMEOUT))

    def _interrupt(self, number: int) -> None:
        """Frees the main thread from iteration `number`."""
        self._part.known_fault = number
        self._guard.fault_seen()
        self._escalating.interrupted()
        self._assigning.abandon(number)
        self._part.interrupt()

    # One method for each `Action`. Before the function.

    def _assign(self) -> Event:
        """The new numbers of this rank, and the next iteration."""
        try:
            self._assigning.assign(self._state, self._closed)
        except RankDiscarded as error:
            return self._part.end_by(error, Event.DISCARDED)
        except GatherAbandoned:
            return Event.INTERRUPTED
        except BaseException as error:
            return self._part.end_by(error)
        return Event.ASSIGNED

    def _arrive(self) -> Event:
        self._part.begin()
        self._server = None
        if self._coordination.must_serve(self._state):
            host = own_address(self._coordination.towards)
            self._server, port = serve_anywhere(host)
            self._iteration.offer(note_of(host, port))
        self._iteration.arrive(self._entry(), lambda: self._escalating.why_end(self._state.iteration))
        self._escalating.forget()
        return self._next(self._barrier_s)

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
        if state.mode is Mode.ACTIVE:
            self._escalating.began()
        return self._part.prepare()

    def _run(self) -> Event:
        return self._part.run()

    def _announce(self) -> Event:
        self._guard.restarting()
        self._iteration.announce_return(self._entry(), self._state.active_world_size or 0)
        return self._next(self._arguments.completion_timeout.total_seconds())

    def _wait(self) -> Event:
        self._guard.restarting()
        return self._next(None)

    def _complete(self) -> Event:
        self._part.complete()
        self._guard.over()
        self._tell("finalized")
        self._feed.join()
        return Event.DONE

    # A fault.

    def _report(self) -> Event:
        error, reached = self._part.fault, reported_iteration()
        if reached != NO_ITERATION:
            error += f" at iteration {reached}"
        self._iteration.interrupt(self._record(Interruption.EXCEPTION, error, self._part.is_collateral))
        return Event.FAILED

    def _recover(self) -> Event:
        self._guard.restarting()
        self._tell("handling_starting")
        within_s = self._arguments.last_call_wait.total_seconds() + self._barrier_s
        deadline = time.monotonic() + within_s
        while self._faulted < self._state.iteration:
            event = self._next(deadline - time.monotonic())
            if event is Event.LATE:
                self._part.end_by(InternalError(f"the abort took longer than {within_s:g} s"))
            if event in (Event.LATE, Event.LOST, Event.DONE):
                return event
        self._guard.finalizing()
        event = self._part.recover()
        self._guard.restarting()
        return event

    def _account(self) -> Event:
        self._iteration.account(self._entry())
        return self._next(self._barrier_s)

    # Others that do not come.

    def _interrupt_for_absent(self) -> Event:
        absent.expel(self._iteration, self._iteration.start, self._all_members)
        return self._next(self._barrier_s)

    def _expel(self) -> Event:
        absent.expel(self._iteration, self._iteration.end, self._all_members)
        return self._next(self._barrier_s)

    def _interrupt_for_unfinished(self) -> Event:
        absent.interrupt_for_unfinished(self._iteration, self._state.active_world_size or 0)
        return self._next(self._barrier_s)

    # Leaving.

    def _discard(self) -> Event:
        self._feed.stopped = True
        record = self._record(Interruption.BASE_EXCEPTION)
        absent.discard(self._store, self._iteration, self._member, self._all_members, record)
        return self._leave()

    def _depart(self) -> Event:
        record = self._record(Interruption.BASE_EXCEPTION)
        with absent.departing(self._store, self._member, record, self._barrier_s, self._assigning.undecided):
            return self._leave()

    def _leave(self) -> Event:
        self._guard.restarting()
        self._feed.stopped = True
        self._part.terminate()
        self._feed.join(self._barrier_s)
        if isinstance(self._part.error, RestartAbort):
            self._tell("aborted", in_words(self._part.error))
        else:
            self._tell("left")
        self._guard.over()
        return Event.ENDED

    # Within.

    def _tell(self, state: str, reason: str = "") -> None:
        """Tells the monitor, and through it the launcher."""
        prefix, limit_s = self._coordination.prefix, self._arguments.restart_limit_s
        self._guard.report(state, self._member, self._state.iteration, prefix, limit_s, reason[:_MAX_REASON])

    def _record(self, interruption: Interruption, error: str = "", is_collateral: bool = False) -> str:
        return InterruptionRecord(self._state.rank or 0, interruption, self._member, error, is_collateral).to_json()

    def _entry(self) -> Entry:
        return Entry(self._member, self._state.rank or 0, self._state.world_size)

    def _next(self, timeout_s: float | None) -> Event:
        """Waits for news; None: as long as it takes."""
        try:
            news = self._feed.news.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        except queue.Empty:
            return Event.LATE
        match news:
            case feed.Started(note):
                self._note = note
                return Event.STARTED
            case feed.End(reason):
                return self._part.end_by(RestartAbort(reason))
            case feed.Fault(number):
                self._faulted = number
                return Event.INTERRUPTED
            case feed.Done():
                return Event.DONE
            case Closed() as closed:
                self._closed = closed
                if closed.has(self._member):
                    return Event.CLOSED
                without = RankDiscarded(f"the others went on without rank {self._state.rank}")
                return self._part.end_by(without, Event.EXCLUDED)
            case feed.Lost(problem):
                return self._lost(problem)

    def _lost(self, problem: BaseException) -> Event:
        return self._part.end_by(InternalError(f"the store of the coordination is lost: {problem}"), Event.LOST)
