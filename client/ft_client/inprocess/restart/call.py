"""One call of a wrapped function on this rank: carries out the actions of the restart machine.

`wrapper.py` makes one `Call` for each call of a wrapped function, and runs it. A call is a sequence of rounds: in each
round every active rank calls the user's function once. `machine.py` explains the phases of a round, and decides what
follows an event. The parts of a call:

- `machine.py` decides: phase and event in, next phase and actions out.
- `Call`, here, carries out each action, and returns the event that the action ended with.
- `user_function.py` calls and interrupts the user's code.
- `store_watcher.py` waits for events of all ranks, and queues them.
- `rank_monitor/contract/rounds/round.py` has the keys in the ranks' store, by which the ranks agree.
- `monitor_link.py` reports each phase to the monitor, and through it to the node agent.

How the ranks found each other is not known here: `coordination.py` made the stores.

Threads: the main thread runs `run` and all actions. `soft_timeout` is called by a thread that `monitor_link.py` starts
for a request of the monitor, `_interrupt` by the watcher's thread. Both interrupt the main thread through
`UserFunction.interrupt`, at first or second hand; neither carries out an action. While this rank leaves, one more
thread reports the departure (`_depart`).
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
from rank_monitor.contract.rounds.round_stores import store_address_of
from rank_monitor.contract.wire.messages import NO_ITERATION

logger = logging.getLogger("ft_client.inprocess")
_MAX_REASON = 400
"""Characters of a reason that the launcher gets: it shows them in one line."""


class Call:
    """One call of a wrapped function on this rank.

    Args:
        arguments: the wrapper's arguments.
        function: the user's function, with the user's arguments bound to it.
        coordination: the stores of the call, and who serves them.
        state: the state of this rank at entry. Each round changes it in place.
        closed: how the previous round ended, for a rank that was started again alone and has just been let in; None
            for a rank that begins with the call's first round.
        link: the link to this rank's monitor.
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
        self._entry_rank = state.initial_rank or 0
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
        self._watcher = StoreWatcher(
            coordination.watched, number=first, entry_rank=self._entry_rank, interrupt=self._interrupt
        )
        self._server: Any = None
        self._store_address = ""
        self._faulted = -1
        self._hung_in = -1

    def run(self) -> Any:
        """Runs the call. Blocks until the function is done on all ranks, or the call ends on this rank.

        Called once, by `wrapper.py`, in the main thread: the only thread that Python can interrupt by a signal.

        Returns:
            What the function returned on this rank, in the round that all active ranks completed; None on a spare.

        Raises:
            BaseException: what ended the call on this rank: `RestartAbort` and its subclasses, `RankDiscarded`, an
                `InternalError`, or a `BaseException` of the function.
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

        The machine enters at CLOSING with CLOSED: the call begins as the round after an interrupted one does, by
        assigning numbers.

        An exception in the wrapper itself, or of a signal handler of the user's that runs there (KeyboardInterrupt at
        Ctrl-C), ends the call on this rank. It becomes an event, so that the rank leaves in an orderly way: it reports
        its departure, and the other ranks do not wait for it until their timeout.
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
        """The present round. `state.iteration` is NVIDIA's public name for its number."""
        return Round(self._store, self._state.iteration)

    # Called in other threads.

    def soft_timeout(self, reason: str) -> None:
        """Interrupts the round on all ranks, since the monitor sees no progress of this rank.

        Called in a thread of its own (`MonitorLink.on_interrupt_asked`), while the main thread may hang. It only writes
        the fault to the store: this rank's watcher then reads it like that of any other rank, and interrupts the main
        thread.

        Args:
            reason: the limit that was exceeded, in words, for the log.
        """
        logger.warning("rank %s: %s: interrupting", self._state.rank, reason)
        self._hung_in = self._state.iteration
        self._round.interrupt(self._record(Interruption.SOFT_TIMEOUT).to_json())

    def _interrupt(self, number: int) -> None:
        """Interrupts the main thread in round `number`, after a fault on any rank. Called in the watcher's thread.

        Blocks until the function has ended. The order matters: `known_fault` comes first, so that an exception that the
        function raises from now on counts as a consequence of this fault, and not as a fault of its own.
        """
        self._function.known_fault = number
        self._link.fault_seen()
        self._escalating.interrupted()
        self._assigning.abandon(number)
        self._function.interrupt()

    # One method for each `RestartAction` but RUN, named in `_ACTIONS`. They run in the main thread, may block as long
    # as their timeout says, and return the event that they ended with. First those before the function.

    def _assign(self) -> RestartEvent:
        """Assigns the numbers of this rank in the next round.

        ASSIGNING is reported only where the assignment may take time: it gathers values from other ranks, or is the
        user's own code. Each report costs the monitor and the agent a wake-up, in each restart.
        """
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
        """Enters the barrier at the start of the round, and waits up to `barrier_timeout` for the other ranks.

        The last rank that arrives decides for all whether a further restart would help
        (`Escalating.reason_to_give_up`), and releases the barrier with its answer. Before the barrier, this rank serves
        the round's store itself where no other process does.
        """
        # After an immediate assignment the last report, CLOSING, still stands, and is judged like ARRIVING.
        if self._closed is None or self._assigning.may_block:
            self._enter(RestartPhase.ARRIVING)
        self._function.begin()
        self._server = None
        if self._coordination.must_serve(self._state):
            host = own_address(self._coordination.towards)
            self._server, port = serve_anywhere(host)
            self._round.offer(store_address_of(host, port))
        self._round.arrive(self._entry(), lambda: self._escalating.reason_to_give_up(self._state.iteration))
        self._escalating.reset()
        return self._next(self._barrier_s)

    def _prepare(self) -> RestartEvent:
        """Sets the environment for the round's process groups, and calls `initialize` and the health check.

        RUNNING is reported here already: monitor and agent judge the callbacks like the function.
        """
        state = self._state
        state.fn_exception = None
        # Every rank has started this round, so no rank reads what is older than the end of the last one.
        if state.rank == 0:
            tidy(self._store, state.iteration)
        self._environment.set(state, self._store_address)
        self._link.running(state.iteration)
        if state.mode is Mode.ACTIVE:
            self._escalating.began()
        return self._function.prepare()

    def _announce(self) -> RestartEvent:
        """Reports that the function returned here, and waits up to `completion_timeout` for the other active ranks."""
        self._enter(RestartPhase.WAITING)
        self._round.announce_return(self._entry(), self._state.active_world_size or 0)
        return self._next(self._arguments.completion_timeout.total_seconds())

    def _wait(self) -> RestartEvent:
        """Waits as a spare, without a limit: until the active ranks are done, or a fault gives this rank a place."""
        self._enter(RestartPhase.WAITING)
        return self._next(None)

    def _complete(self) -> RestartEvent:
        """Calls `completion`: the function is done on all ranks. If `completion` raises, the call raises that."""
        self._enter(RestartPhase.COMPLETING, self._arguments.completion_timeout.total_seconds())
        ended = RestartPhase.NONE
        try:
            self._function.complete()
            ended = RestartPhase.DONE
        finally:
            self._link.over(ended, self._state.iteration)
        self._watcher.join()
        return RestartEvent.DONE

    # After a fault.

    def _report(self) -> RestartEvent:
        """Writes the exception of this rank to the store, which interrupts the round on every rank.

        By the record, `contract/rounds/escalation.py` finds out whether the same error comes again and again. Where the
        training's iteration is known, the record names it: an error in another iteration is another error. Where it is
        not, the digest of the exception's text is compared instead.
        """
        record, reached = self._record(Interruption.EXCEPTION), reported_iteration()
        record = replace(record, error=self._function.fault, is_collateral=self._function.is_collateral)
        if reached != NO_ITERATION:
            record = replace(record, error=f"{record.error} at iteration {reached}")
        else:
            record = replace(record, text=self._function.fault_text)
        self._round.interrupt(record.to_json())
        return RestartEvent.FAILED

    def _await_abort(self) -> RestartEvent:
        """Waits until the watcher's thread has aborted what ran on this rank.

        The function may have failed by itself, ahead of the watcher. `finalize` and the next round must not begin
        before the abort is over: it would destroy the groups of the next round. If the abort takes longer than
        `last_call_wait` and `barrier_timeout` together, this rank leaves.
        """
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
        """Calls `finalize` and the health check. The monitor ends this rank if they exceed `hard_timeout`."""
        self._enter(RestartPhase.FINALIZING)
        return self._function.recover()

    def _account(self) -> RestartEvent:
        """Enters the barrier at the end of the round, and waits up to `barrier_timeout` until the round has closed."""
        self._enter(RestartPhase.CLOSING)
        self._round.account(self._entry())
        return self._next(self._barrier_s)

    # Where other ranks do not come. Any rank may do this; reports by several ranks about the same rank do no harm.

    def _interrupt_for_absent(self) -> RestartEvent:
        """Reports the ranks that did not arrive at the start."""
        return self._report_lost(self._round.start)

    def _expel(self) -> RestartEvent:
        """Reports the ranks that did not arrive at the end."""
        return self._report_lost(self._round.end)

    def _report_lost(self, arrivals: Arrivals) -> RestartEvent:
        """Interrupts the round for all ranks that have not arrived at a barrier, and reports them as lost.

        Then waits, up to `barrier_timeout`, for the watcher's next event. A rank that was reported as lost finds itself
        excluded when it reads how the round closed, and leaves.
        """
        late = self._round.missing(arrivals, self._all_members)
        self._interrupt_for(late)
        for member in late:
            self._round.account(Entry(member, is_well=False))
        return self._next(self._barrier_s)

    def _interrupt_for_unfinished(self) -> RestartEvent:
        """Interrupts the round for the active ranks on which the function has not returned in time.

        Spares are left out: the function never runs on them. The unfinished ranks are not reported as lost, since
        an interrupted function usually ends.
        """
        this_round, size = self._round, self._state.active_world_size or 0
        active = {entry.entry_rank for entry in this_round.start.entries() if entry.rank < size}
        missing = this_round.missing(this_round.returned, self._all_members)
        self._interrupt_for([member for member in missing if member in active])
        return self._next(self._barrier_s)

    def _interrupt_for(self, late: list[int]) -> None:
        """Interrupts the round, with one record for each late rank.

        Args:
            late: the ranks, by their numbers at entry.
        """
        this_round = self._round
        ranks = {entry.entry_rank: entry.rank for entry in this_round.start.entries()}
        for member in late:
            logger.warning("rank %d (at entry) did not come in time in round %d", member, this_round.number)
            this_round.interrupt(InterruptionRecord(ranks.get(member, member), Interruption.UNRESPONSIVE).to_json())

    # Leaving.

    def _discard(self) -> RestartEvent:
        """Leaves, since the rank assignment has no place for this rank.

        All ranks know that by the same assignment. Only if the assignment discarded every rank, no rank arrives at the
        start: the last of them then interrupts the round, for the processes that still wait for its start.
        """
        self._watcher.stopped = True
        out = discarded(self._store)
        out.sign(Entry(self._entry_rank))
        if {entry.entry_rank for entry in out.entries()}.issuperset(self._round.everybody(self._all_members)):
            # No rank arrives, so no other rank releases the start.
            self._round.interrupt(self._record(Interruption.BASE_EXCEPTION).to_json())
        return self._leave()

    def _depart(self) -> RestartEvent:
        """Leaves, and reports the departure to the other ranks.

        The report blocks until the other ranks have closed the round, so it has a thread of its own, and begins before
        the callback `terminate`: the other ranks must not wait for what this rank still does.
        """
        record, undecided = self._record(Interruption.BASE_EXCEPTION).to_json(), self._assigning.undecided
        report = partial(depart, self._store, self._entry_rank, record, self._barrier_s, undecided)
        reported = in_thread(report, "departure")
        event = self._leave()
        problem = reported.exception()
        if problem is not None:
            logger.warning("the others may not know that rank %d leaves: %s", self._entry_rank, problem)
        return event

    def _leave(self) -> RestartEvent:
        """Calls `terminate`, waits for the watcher, and reports the end of the call to the monitor.

        The phase is reported twice: `hard_timeout` limits `terminate`, and the second report adds the time for which
        this rank may wait for its watcher. A rank that gives up says why: the agent then knows that no further restart
        in process would help.
        """
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

    # Used by several actions.

    def _enter(self, phase: RestartPhase, limit_s: float = 0.0) -> None:
        """Reports a phase of this round to the monitor, and through it to the launcher. Waits 0.1 s at most.

        Args:
            phase: the phase that begins now.
            limit_s: seconds within which a callback of this phase must end; 0.0: `hard_timeout`.
        """
        self._link.report(phase, self._state.iteration, limit_s)

    def _record(self, interruption: Interruption) -> InterruptionRecord:
        """Returns a record of what happened on this rank, for the ranks' store."""
        return InterruptionRecord(self._state.rank or 0, interruption, self._entry_rank)

    def _entry(self) -> Entry:
        """Returns the entry of this rank for a barrier of the present round."""
        return Entry(self._entry_rank, self._state.rank or 0, self._state.world_size)

    def _next(self, timeout_s: float | None) -> RestartEvent:
        """Waits for the next event of the watcher, and notes what the event brings.

        Args:
            timeout_s: how long to wait, in seconds; None: without a limit.

        Returns:
            The event; LATE when none came in time; EXCLUDED in place of CLOSED when this rank is not among those that
            take part in the next round.
        """
        if timeout_s is not None:
            timeout_s = max(0.0, timeout_s)
        try:
            event = self._watcher.events.get(timeout=timeout_s)
        except queue.Empty:
            return RestartEvent.LATE
        match event.kind:
            case RestartEvent.STARTED:
                self._store_address = event.value
            case RestartEvent.ENDED:
                # Only the rank that hung gives up by `HungAgain`, which ends its process where there is no launcher.
                is_hung = is_about_hangs(event.value) and self._hung_in == self._state.iteration - 1
                if is_hung:
                    self._function.end_by(HungAgain(event.value))
                else:
                    self._function.end_by(RestartAbort(event.value))
            case RestartEvent.INTERRUPTED:
                self._faulted = event.value
            case RestartEvent.CLOSED:
                self._closed = event.value
                if not event.value.has(self._entry_rank):
                    without = RankDiscarded(f"the others went on without rank {self._state.rank}")
                    return self._function.end_by(without, RestartEvent.EXCLUDED)
            case RestartEvent.LOST:
                self._lost(event.value)
        return event.kind

    def _lost(self, problem: BaseException) -> RestartEvent:
        """Notes that the store is lost, which ends the call on this rank. Returns LOST."""
        return self._function.end_by(
            InternalError(f"the store of the coordination is lost: {problem}"), RestartEvent.LOST
        )


def _last_interruption(store: Any, number: int) -> LastInterruption:
    """Returns why round `number` ended, for `CallWrapper.last_interruption`.

    A function of the module and no method: the user may keep the `CallWrapper`, which must not keep the call and its
    connections alive.
    """
    this_round = Round(store, number)
    return last_interruption(this_round.records(), this_round.culprit())


_ACTIONS: dict[RestartAction, Callable[[Call], RestartEvent]] = {
    RestartAction.ASSIGN: Call._assign,
    RestartAction.ARRIVE: Call._arrive,
    RestartAction.PREPARE: Call._prepare,
    RestartAction.RUN: lambda call: call._function.run(),
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
"""What carries out each action of the machine: a method of `Call`, or for RUN of `UserFunction`. Each returns the event
that it ended with, the input of the next step."""
