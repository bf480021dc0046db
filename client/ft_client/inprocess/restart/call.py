"""One call of a wrapped function on this rank: carries out the actions of the restart machine in the main thread.

`wrapper.py` makes one for each call. The machine decides (`machine.py`), the user's code runs in `user_function.py`,
the watcher reports events of all ranks (`store_watcher.py`), the keys in the store are those of
`rank_monitor.contract.rounds.round`. How the ranks found each other is not known here.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import distributed

from ft_client.inprocess.arguments import Arguments
from ft_client.inprocess.assignment.gather import GatherAbandoned
from ft_client.inprocess.attribution import (
    Interruption,
    InterruptionRecord,
    LastInterruption,
    last_interruption,
)
from ft_client.inprocess.call_wrapper import CallWrapper
from ft_client.inprocess.callback import in_thread
from ft_client.inprocess.exception import HungAgain, InternalError, RestartAbort
from ft_client.inprocess.rank_assignment import RankDiscarded
from ft_client.inprocess.restart.assigning import Assigning, RoundEnvironment
from ft_client.inprocess.restart.coordination import Coordination
from ft_client.inprocess.restart.escalating import Escalating, reported_iteration
from ft_client.inprocess.restart.machine import ENDS, RestartAction, RestartEvent, step
from ft_client.inprocess.restart.monitor_link import MonitorLink
from ft_client.inprocess.restart.store_watcher import StoreWatcher
from ft_client.inprocess.restart.user_function import UserFunction
from ft_client.inprocess.standalone.store_host import own_address, serve_anywhere
from ft_client.inprocess.state import Mode, State
from rank_monitor.contract.errors import text_of
from rank_monitor.contract.restart_phase import RestartPhase
from rank_monitor.contract.rounds.barrier import Arrivals, Entry
from rank_monitor.contract.rounds.escalation import is_about_hangs
from rank_monitor.contract.rounds.round import Closed, Round, depart, discarded, tidy
from rank_monitor.contract.rounds.round_stores import note_of
from rank_monitor.contract.wire.messages import NO_ITERATION

logger = logging.getLogger("ft_client.inprocess")
_MAX_REASON = 400
"""Characters of a reason that the launcher gets: it shows them in one line."""


class Call:
    """One call.

    Args:
        arguments: of the wrapper.
        function: the user's, with its arguments.
        coordination: the store of the call.
        state: of this rank at entry; changed in place.
        closed: for a rank that joined at a restart: how the previous round ended; else None.
        link: the link to the monitor.
    """

    def __init__(
        self,
        arguments: Arguments,
        function: Callable[[CallWrapper], Any],
        coordination: Coordination,
        state: State,
        closed: Closed | None,
        link: MonitorLink,
    ) -> None:
        self._arguments, self._coordination, self._state = arguments, coordination, state
        self._closed, self._link = closed, link
        self._member = state.initial_rank or 0
        self._barrier_s = arguments.barrier_timeout.total_seconds()
        self._all_members = state.initial_world_size or state.world_size
        self._store = coordination.store
        self._function = UserFunction(arguments, function, state, link, partial(_last_interruption, coordination.store))
        self._assigning = Assigning(arguments.assignment, coordination.store, coordination.watched)
        self._environment = RoundEnvironment()
        self._escalating = Escalating(arguments, coordination.store, link)
        first = state.iteration
        if closed is not None:
            first += 1
        self._watcher = StoreWatcher(coordination.watched, first, self._member, self._interrupt)
        self._server: Any = None
        self._note = ""
        self._faulted = -1
        self._hung_in = -1

    def run(self) -> Any:
        """Runs the call. Returns this rank's result of the round that all completed; None on a spare.

        Raises:
            BaseException: what ended the call on this rank.
        """
        self._watcher.start()
        try:
            phase, event = self._play()
        finally:
            self._function.close()
            self._environment.restore()
        if phase is RestartPhase.DONE:
            return self._function.final_result()
        raise self._function.final_error(event)

    def _play(self) -> tuple[RestartPhase, RestartEvent]:
        """Runs the machine to its end. Returns the last phase and event.

        An exception in the wrapper itself, or of a signal handler that runs there, ends the call on this rank.
        """
        phase, event = RestartPhase.CLOSING, RestartEvent.CLOSED
        while phase not in ENDS:
            try:
                phase, actions = step(phase, event)
                for action in actions:
                    event = _ACTIONS[action](self)
                    if event in (RestartEvent.ENDED, RestartEvent.LOST):
                        break
            except BaseException as error:
                if phase in ENDS:
                    raise
                if isinstance(error, distributed.DistNetworkError):
                    event = self._lost(error)
                else:
                    event = self._function.end_by(error)
        return phase, event

    @property
    def _round(self) -> Round:
        return Round(self._store, self._state.iteration)

    # Called in other threads.

    def soft_timeout(self, reason: str) -> None:
        """Interrupts the round: the monitor sees no progress of this rank. Called in the watchdog's thread."""
        logger.warning("rank %s: %s: interrupting", self._state.rank, reason)
        self._hung_in = self._state.iteration
        self._round.interrupt(self._record(Interruption.SOFT_TIMEOUT).to_json())

    def _interrupt(self, number: int) -> None:
        """Interrupts the main thread in round `number`. Called in the watcher's thread."""
        self._function.known_fault = number
        self._link.fault_seen()
        self._escalating.interrupted()
        self._assigning.abandon(number)
        self._function.interrupt()

    # One method for each `RestartAction`, in `_ACTIONS`. Before the function.

    def _assign(self) -> RestartEvent:
        """Assigns the numbers of this rank in the next round. What takes no time is not reported as a phase."""
        if self._assigning.may_block:
            coming = self._state.iteration
            if self._closed is not None:
                coming += 1
            self._link.report(RestartPhase.ASSIGNING, coming, self._arguments.assignment_limit_s)
        try:
            self._assigning.assign(self._state, self._closed)
        except RankDiscarded as error:
            return self._function.end_by(error, RestartEvent.DISCARDED)
        except GatherAbandoned:
            return RestartEvent.INTERRUPTED
        except BaseException as error:
            return self._function.end_by(error)
        return RestartEvent.ASSIGNED

    def _arrive(self) -> RestartEvent:
        if self._closed is None or self._assigning.may_block:  # else it is closing still, and is judged alike
            self._enter(RestartPhase.ARRIVING)
        self._function.begin()
        self._server = None
        if self._coordination.must_serve(self._state):
            host = own_address(self._coordination.towards)
            self._server, port = serve_anywhere(host)
            self._round.offer(note_of(host, port))
        self._round.arrive(self._entry(), lambda: self._escalating.why_end(self._state.iteration))
        self._escalating.forget()
        return self._next(self._barrier_s)

    def _prepare(self) -> RestartEvent:
        state = self._state
        state.fn_exception = None
        if state.rank == 0:  # everybody has come here: nobody reads what is older than the end of the last
            tidy(self._store, state.iteration)
        self._environment.set(state, self._note)
        self._link.running(state.iteration)
        if state.mode is Mode.ACTIVE:
            self._escalating.began()
        return self._function.prepare()

    def _run(self) -> RestartEvent:
        return self._function.run()

    def _announce(self) -> RestartEvent:
        self._enter(RestartPhase.WAITING)
        self._round.announce_return(self._entry(), self._state.active_world_size or 0)
        return self._next(self._arguments.completion_timeout.total_seconds())

    def _wait(self) -> RestartEvent:
        self._enter(RestartPhase.WAITING)
        return self._next(None)

    def _complete(self) -> RestartEvent:
        self._enter(RestartPhase.COMPLETING, self._arguments.completion_timeout.total_seconds())
        ended = RestartPhase.NONE
        try:
            self._function.complete()
            ended = RestartPhase.DONE
        finally:
            self._link.over(ended, self._state.iteration)
        self._watcher.join()
        return RestartEvent.DONE

    # A fault.

    def _report(self) -> RestartEvent:
        record, reached = self._record(Interruption.EXCEPTION), reported_iteration()
        record = replace(record, error=self._function.fault, is_collateral=self._function.is_collateral)
        if reached != NO_ITERATION:
            record = replace(record, error=f"{record.error} at iteration {reached}")
        else:
            record = replace(record, text=self._function.fault_text)
        self._round.interrupt(record.to_json())
        return RestartEvent.FAILED

    def _await_abort(self) -> RestartEvent:
        self._enter(RestartPhase.RECOVERING)
        within_s = self._arguments.last_call_wait.total_seconds() + self._barrier_s
        deadline = time.monotonic() + within_s
        while self._faulted < self._state.iteration:
            event = self._next(deadline - time.monotonic())
            if event is RestartEvent.LATE:
                self._function.end_by(InternalError(f"the abort took longer than {within_s:g} s"))
            if event in (RestartEvent.LATE, RestartEvent.LOST, RestartEvent.DONE):
                return event
        return RestartEvent.INTERRUPTED

    def _finalize(self) -> RestartEvent:
        self._enter(RestartPhase.FINALIZING)
        return self._function.recover()

    def _account(self) -> RestartEvent:
        self._enter(RestartPhase.CLOSING)
        self._round.account(self._entry())
        return self._next(self._barrier_s)

    # Others that do not come.

    def _interrupt_for_absent(self) -> RestartEvent:
        return self._report_lost(self._round.start)

    def _expel(self) -> RestartEvent:
        return self._report_lost(self._round.end)

    def _report_lost(self, arrivals: Arrivals) -> RestartEvent:
        """Interrupts the round for all members that have not arrived at a barrier, and reports them as lost."""
        late = self._round.missing(arrivals, self._all_members)
        self._interrupt_for(late)
        for member in late:
            self._round.account(Entry(member, is_well=False))
        return self._next(self._barrier_s)

    def _interrupt_for_unfinished(self) -> RestartEvent:
        this_round, size = self._round, self._state.active_world_size or 0
        active = {entry.member for entry in this_round.start.entries() if entry.rank < size}
        missing = this_round.missing(this_round.returned, self._all_members)
        self._interrupt_for([member for member in missing if member in active])
        return self._next(self._barrier_s)

    def _interrupt_for(self, late: list[int]) -> None:
        this_round = self._round
        ranks = {entry.member: entry.rank for entry in this_round.start.entries()}
        for member in late:
            logger.warning("rank %d (at entry) did not come in time in round %d", member, this_round.number)
            this_round.interrupt(InterruptionRecord(ranks.get(member, member), Interruption.UNRESPONSIVE).to_json())

    # Leaving.

    def _discard(self) -> RestartEvent:
        self._watcher.stopped = True
        out = discarded(self._store)
        out.sign(Entry(self._member))
        if {entry.member for entry in out.entries()}.issuperset(self._round.everybody(self._all_members)):
            # Nobody comes, so nobody else releases the start.
            self._round.interrupt(self._record(Interruption.BASE_EXCEPTION).to_json())
        return self._leave()

    def _depart(self) -> RestartEvent:
        record, undecided = self._record(Interruption.BASE_EXCEPTION).to_json(), self._assigning.undecided
        report = partial(depart, self._store, self._member, record, self._barrier_s, undecided)
        reported = in_thread(report, "departure")  # meanwhile: the others must not wait for what this rank still does
        event = self._leave()
        problem = reported.exception()
        if problem is not None:
            logger.warning("the others may not know that rank %d leaves: %s", self._member, problem)
        return event

    def _leave(self) -> RestartEvent:
        self._watcher.stopped = True
        self._enter(RestartPhase.LEAVING)
        self._function.terminate()
        self._enter(RestartPhase.LEAVING, self._barrier_s + self._arguments.hard_timeout.total_seconds())
        self._watcher.join(self._barrier_s)
        if isinstance(self._function.error, RestartAbort):
            reason = text_of(self._function.error)[:_MAX_REASON]
            self._link.over(RestartPhase.GAVE_UP, self._state.iteration, reason)
        else:
            self._link.over(RestartPhase.LEFT, self._state.iteration)
        return RestartEvent.ENDED

    # Within.

    def _enter(self, phase: RestartPhase, limit_s: float = 0.0) -> None:
        """Reports a phase of this round to the monitor, and through it to the launcher; `limit_s`: of a callback."""
        self._link.report(phase, self._state.iteration, limit_s)

    def _record(self, interruption: Interruption) -> InterruptionRecord:
        return InterruptionRecord(self._state.rank or 0, interruption, self._member)

    def _entry(self) -> Entry:
        return Entry(self._member, self._state.rank or 0, self._state.world_size)

    def _next(self, timeout_s: float | None) -> RestartEvent:
        """Waits up to `timeout_s` seconds (None: without limit) for an event of the watcher."""
        if timeout_s is not None:
            timeout_s = max(0.0, timeout_s)
        try:
            event = self._watcher.events.get(timeout=timeout_s)
        except queue.Empty:
            return RestartEvent.LATE
        match event.kind:
            case RestartEvent.STARTED:
                self._note = event.value
            case RestartEvent.ENDED:
                is_hung = is_about_hangs(event.value) and self._hung_in == self._state.iteration - 1
                if is_hung:
                    self._function.end_by(HungAgain(event.value))
                else:
                    self._function.end_by(RestartAbort(event.value))
            case RestartEvent.INTERRUPTED:
                self._faulted = event.value
            case RestartEvent.CLOSED:
                self._closed = event.value
                if not event.value.has(self._member):
                    without = RankDiscarded(f"the others went on without rank {self._state.rank}")
                    return self._function.end_by(without, RestartEvent.EXCLUDED)
            case RestartEvent.LOST:
                self._lost(event.value)
        return event.kind

    def _lost(self, problem: BaseException) -> RestartEvent:
        return self._function.end_by(
            InternalError(f"the store of the coordination is lost: {problem}"), RestartEvent.LOST
        )


def _last_interruption(store: Any, number: int) -> LastInterruption:
    """Why round `number` ended. Keeps no reference to the call."""
    this_round = Round(store, number)
    return last_interruption(this_round.records(), this_round.blame())


_ACTIONS: dict[RestartAction, Callable[[Call], RestartEvent]] = {
    RestartAction.ASSIGN: Call._assign,
    RestartAction.ARRIVE: Call._arrive,
    RestartAction.PREPARE: Call._prepare,
    RestartAction.RUN: Call._run,
    RestartAction.ANNOUNCE: Call._announce,
    RestartAction.WAIT: Call._wait,
    RestartAction.COMPLETE: Call._complete,
    RestartAction.REPORT: Call._report,
    RestartAction.AWAIT_ABORT: Call._await_abort,
    RestartAction.FINALIZE: Call._finalize,
    RestartAction.ACCOUNT: Call._account,
    RestartAction.INTERRUPT_FOR_ABSENT: Call._interrupt_for_absent,
    RestartAction.EXPEL: Call._expel,
    RestartAction.INTERRUPT_FOR_UNFINISHED: Call._interrupt_for_unfinished,
    RestartAction.DISCARD: Call._discard,
    RestartAction.DEPART: Call._depart,
    RestartAction.LEAVE: Call._leave,
}
"""The method for each action of the machine. Each returns the event that it ended with."""
