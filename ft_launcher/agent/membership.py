"""The membership of a node in its job: reports to the coordinator and carries out what the coordinator decides.

The node agent makes one and calls it on its own thread. For each cycle:

1. `form`, from torch's hook `_rendezvous`: health, a place in the next cycle, the cycle's store. The request for the
   place carries the fault of the last cycle, and the answer carries the decision about it.
2. `poll`, as a source of events: the cycle has ended on other nodes, or this node is cut off or stood still.
3. `after`, when the cycle has ended: reports the end, stops the ranks, and keeps the fault for the next `form`. A
   `JobEnd` in the place of None says that no cycle follows.

`leave` follows at the end of the job. `joining.py` has the way into a cycle, `last_end.py` keeps and records what was
found of a cycle, `departure.py` has the last word to the other nodes.

The membership does not decide what follows the end of a cycle: the coordinator does, once for all nodes. The
coordinator is in this process where the node is the only one, or where the rendezvous is not ours.

The order of report and stop differs by the kind of end, and matters. After a failure the report goes first, so that all
nodes stop at the same time. After a request of a rank the stop goes first, and the other nodes end their ranks when
this node's are gone. A node that is cut off kills its ranks before all else.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import SignalException

from ft_launcher.agent import fault_finding
from ft_launcher.agent.cycle.cycle import CyclePhase, EndedElsewhere, Event
from ft_launcher.agent.departure import Departure
from ft_launcher.agent.ending_signal import EndingSignal
from ft_launcher.agent.event_source import EventSource
from ft_launcher.agent.fault_finding import NodeFindings
from ft_launcher.agent.job_end import JobEnd, NoFurtherCycle
from ft_launcher.agent.joining import Joining
from ft_launcher.agent.last_end import LastEnd
from ft_launcher.agent.ranks import Ranks
from ft_launcher.agent.results import Results
from ft_launcher.decide.policy.case import RankRequest
from ft_launcher.decide.policy.restart_policy import Action, asked_by
from ft_launcher.job.coordinator.node_messages import CycleEnd, EndReason, JobOver
from ft_launcher.job.link.coordinator_link import Cut, CutReason
from ft_launcher.job.rendezvous.cycle_store import CycleStore
from ft_launcher.job.rendezvous.handler import NodeRendezvous, NoPlace
from ft_launcher.node.processes.signals import told_to_end
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.processes.wait import readable

logger = logging.getLogger(__name__)

_ENDS_AFTER_SIGNAL_S = 5.0
"""Seconds after a signal in which the other nodes' end may arrive. The training is complete here: nothing else is lost
by ending without it."""


class Membership(EventSource):
    """This node's part in the job: forms each cycle, can end it, and learns what follows its end.

    Args:
        ranks: of this node.
        results: torch's results of them.
        ending: the signal that ends the launcher.
        rendezvous: connects this node to the coordinator.
        exit_barrier: torch's, by which the agents of a rendezvous that is not ours wait for each other's success.
    """

    def __init__(
        self,
        ranks: Ranks,
        results: Results,
        ending: EndingSignal,
        rendezvous: NodeRendezvous,
        exit_barrier: Callable[[], None],
    ) -> None:
        self._ranks = ranks
        self._parts = ranks.parts
        self._results = results
        self._ending = ending
        self._nodes = rendezvous
        self._exit_barrier = exit_barrier
        self._end: CycleEnd | None = None
        """The cycle's end as the coordinator has written it. Set by `poll`, and read by `after`: the phase says
        less."""
        self._cut: Cut | None = None
        """Why this node is cut off. Set and read as `_end`."""
        self._last_end = LastEnd(ranks, rendezvous)
        self._joining = Joining(ranks, results, ending, rendezvous, self._last_end)
        self._departure = Departure(ending, rendezvous, ranks.parts.settings.stop.exit_barrier_timeout)
        # The code of a preemption in which no rank was left to be killed; `preempt` says when it is another.
        self._preempted = int(ExitCode.PREEMPTED)

    # As a source of events.

    def descriptors(self) -> set[int]:
        """Readable when the cycle's end may have arrived."""
        return self._nodes.descriptors()

    def next_check(self) -> float | None:
        """Returns when to ask whether this node is cut off (monotonic seconds); None: the coordinator is in this
        process."""
        return self._nodes.next_check()

    def poll(self, ready: Set[int]) -> list[Event]:
        """Receives the end of the cycle on other nodes, and notices that this node is cut off or stood still.

        Does not block. Called at each wake-up of the cycle loop, after the ranks: an end of a rank of this node goes
        before an end on other nodes that arrived at the same wake-up.
        """
        # The lease is looked at first. Where it ran out, the monitors have ended the ranks or are about to, whatever
        # else has arrived since.
        lease = self._nodes.lease
        if lease is not None and lease.silent_s() is not None:
            return [CyclePhase.FENCED]
        events: list[Event] = []
        self._nodes.poll(ready)
        end = self._nodes.pop_end()
        if end is not None:
            self._end = end
            events.append(EndedElsewhere(end))
        cut = self._nodes.link.cut(time.monotonic())
        if cut is not None:
            self._cut = cut
            events.append(CyclePhase.CUT_OFF)
            return events
        trouble = self._nodes.trouble()
        if trouble is not None:
            self._parts.recorder.store_silent(trouble)
        return events

    # Forming a cycle.

    def form(self, assign_ranks: Callable[[], None]) -> CycleStore:
        """Checks this node, waits for its place in the next cycle, and opens the cycle's store.

        Blocks until enough nodes take part, which may be for ever. A signal to the launcher ends the wait. What follows
        the last cycle is recorded here, since the decision arrives with the place. The decision also applies to the
        ranks of the next cycle: a learned limit that is doubled, a suspect result, a state in memory that is bad.

        Args:
            assign_ranks: has torch's agent call the rendezvous, and numbers the ranks.

        Returns:
            The store of the next cycle.

        Raises:
            NoFurtherCycle: the job is over for this node.
            SignalException: the launcher got a signal.
        """
        self._end = self._cut = None
        try:
            waited_s = self._joining.await_decision()
            while not self._joining.try_to_join(assign_ranks):
                pass
        except NoPlace as over:
            raise NoFurtherCycle(self._over(over.over)) from None
        place, store = self._nodes.place, self._nodes.cycle_store
        assert place is not None and store is not None
        judgement = place.judgement
        if not self._nodes.is_local:
            self._last_end.record(judgement, place.reason)
        self._ranks.suspect_result = None
        if judgement is None:
            self._parts.times.formed(0.0)
            return store
        self._parts.times.formed(judgement.decision.wait_s - waited_s)
        self._ranks.relax_learned_limit(judgement.relaxed_limit)
        self._ranks.suspect_result = judgement.suspect_result
        self._parts.state_in_memory.mark(judgement.decision.set_aside_from, judgement.decision.no_save_until)
        return store

    @contextmanager
    def during_cycle(self) -> Iterator[None]:
        """Returns a context that is open while the loop of a cycle runs.

        In it, an end of the cycle that arrived must be taken by `poll` soon. If it is not, this thread hangs, and the
        link's thread stops renewing the lease: the monitors then end the ranks in the launcher's place.
        """
        self._nodes.link.is_polled = True
        try:
            yield
        finally:
            self._nodes.link.is_polled = False

    # After its end.

    def after(self, phase: CyclePhase) -> JobEnd | None:
        """Reports the end to the coordinator and ends the ranks. Called once, when the cycle loop has ended.

        Blocks while ranks are stopped and evidence is gathered, and after a success until the other nodes are done.

        Args:
            phase: how the cycle ended on this node.

        Returns:
            How the job ended; None: a cycle may follow, and the coordinator's answer to the next `form` says so.

        Raises:
            SignalException: the launcher got a signal that ends it.
        """
        match phase:
            case CyclePhase.SUCCEEDED:
                return self._after_success()
            case CyclePhase.FAILED | CyclePhase.ASKED:
                self._after_failure()
                return None
            case CyclePhase.FAILED_ELSEWHERE:
                self._after_failure_elsewhere(self._end_elsewhere)
                return None
            case CyclePhase.PREEMPTED_ELSEWHERE:
                return self._after_preemption(self._end_elsewhere)
            case CyclePhase.REGROUP:
                self._after_regroup(self._end_elsewhere)
                return None
            case CyclePhase.JOB_ENDED:
                return self._after_job_end(self._end_elsewhere)
            case CyclePhase.CUT_OFF:
                return self._after_cut()
            case CyclePhase.FENCED:
                self._after_fence()
                return None
            case CyclePhase.SIGNALLED:
                self._end_by_signal()
        raise AssertionError(f"a cycle never ends in {phase}")

    def _after_failure(self) -> None:
        """Reports the failure, stops this node's ranks and keeps the fault for the next arrival.

        The report goes out before the stop, so that all nodes stop together. It names the kind of end, since the other
        nodes act on it before they stop: after a hang each keeps the stacks of its ranks, and after an agreed exit each
        lets its ranks save.
        """
        ranks = self._ranks
        if self._nodes.is_alone and not ranks.have_agreed:
            # Only a node that is alone waits for a cause. Among several nodes all would stop later for it, and the
            # cause may be on any of them.
            seen = fault_finding.await_cause(ranks, self._ending.signals.fileno())
        else:
            seen = fault_finding.look(ranks)
        # The request of a rank that asks and exits may come after the failures of ranks that lose it.
        if ranks.request is not None:
            self._after_request(ranks.request)
            return
        hung = seen.stood_still or seen.hangs
        end_reason = EndReason.FAILED
        if ranks.have_agreed:
            end_reason = EndReason.AGREED
        elif seen.stood_still:
            end_reason = EndReason.STOOD_STILL
        elif hung:
            end_reason = EndReason.HUNG
        self._nodes.report_end(end_reason, "a rank failed")
        if ranks.have_agreed:
            self._await_agreed_exits()
        self._last_end.store(fault_finding.stop_and_attribute(ranks, hung, seen.stood_still))

    def _await_agreed_exits(self) -> None:
        """Waits until the ranks have saved and ended, since all of them exit after the same step.

        Raises:
            SignalException: the launcher got a signal meanwhile, which goes before the agreement.
        """
        self._ending.await_agreed_exits()
        if self._ending.number is not None:
            self._end_by_signal()

    @property
    def _end_elsewhere(self) -> CycleEnd:
        """The end that `poll` has received. Only for the phases that follow from one."""
        assert self._end is not None, "no other node has ended the cycle"
        return self._end

    def _after_failure_elsewhere(self, end: CycleEnd) -> None:
        """Stops the ranks of a cycle that failed on another node, or lost a node, and keeps what is found here for the
        next arrival.

        A rank of this node may still be the cause, when its death is noticed late. So the fault is looked for here,
        too, and the coordinator compares the faults of all nodes.
        """
        if end.reason is EndReason.AGREED:
            self._await_agreed_exits()
        # A rank of this node may have been ended for the hang, while another node was quicker to report that its ranks
        # have lost that rank.
        stood_still = end.reason is EndReason.STOOD_STILL
        if not stood_still and self._parts.settings.monitor.hang_timeout is not None:
            stood_still = fault_finding.look(self._ranks).stood_still
        hung = stood_still or end.reason is EndReason.HUNG
        began = None
        if end.reason in (EndReason.HUNG, EndReason.STOOD_STILL):
            # When the hang began is not known here: the ranks of this node have waited since their last progress.
            began = 0.0
        self._parts.times.failed(began)
        self._last_end.store(fault_finding.stop_and_attribute(self._ranks, hung, stood_still))

    def _after_regroup(self, end: CycleEnd) -> None:
        """Stops the ranks of a cycle that ended without a fault, since other nodes take part in the next one.

        Ranks of this node may have lost one of a node that left, or one may have failed at this very moment.
        """
        if end.reason is not EndReason.RESTART:
            self._parts.times.membership_changes()
        self._last_end.store(fault_finding.stop_and_attribute(self._ranks, hung=False))

    def _after_job_end(self, end: CycleEnd) -> JobEnd:
        """Stops the ranks, since the job is over for all nodes, and returns how it ended for this one."""
        assert end.exit_code is not None
        if end.reason is EndReason.LEFT:
            self._parts.times.membership_changes()
        self._ranks.stop()
        return self._over(JobOver(end.exit_code, end.text))

    def _after_preemption(self, end: CycleEnd) -> JobEnd | None:
        """Ends the ranks because another node got a signal to end: all stop together, and no fault is recorded.

        The ranks get the signal that the other launcher got, and save. Returns None where the job goes on without that
        node: this one asks for a place again.
        """
        self._parts.recorder.preempted_on_other_node(self._ranks.cycle, end.text)
        # The number comes from another node. Signals that cannot be handled would give the ranks no time to save.
        is_signal = end.signal in signal.valid_signals() and end.signal not in (signal.SIGKILL, signal.SIGSTOP)
        self._preempted = self._ending.preempt(end.signal if is_signal else signal.SIGTERM)
        self._nodes.ranks_ended()
        if self._ending.number is not None:
            self._end_by_signal()
        if end.exit_code is not None:
            return self._over(JobOver(end.exit_code, end.text))
        self._last_end.store(NodeFindings())
        return None

    def _end_by_signal(self) -> NoReturn:
        """Ends the ranks after a signal to this launcher, and has the other nodes end theirs.

        Raises:
            SignalException: always.
        """
        number = self._ending.preempting
        # Where no rank runs here, the other nodes learn of the signal when this node leaves.
        if number and self._ranks.running():
            self._nodes.report_end(EndReason.PREEMPTED, told_to_end(number), number=number)
        error = self._ending.end_ranks()
        if number:
            self._nodes.ranks_ended()
        raise error

    def _after_request(self, asked: RankRequest) -> None:
        """Ends the ranks and reports the request of one of them; the answer to the next arrival says what follows.

        A request is no fault: of what was found at the stop only the ranks' views are kept, for the other nodes.
        """
        found = fault_finding.stop_and_attribute(self._ranks, hung=False)
        self._nodes.report_end(EndReason.ASKED, asked_by(asked.rank, asked.request), asked)
        self._last_end.store(NodeFindings(views=found.views), asked)

    def _over(self, over: JobOver) -> JobEnd:
        """Records the end of the job for this node, and returns it with torch's result.

        Args:
            over: the coordinator's word that no cycle follows for this node.
        """
        fault = self._last_end.found.fault
        # On one node this code is never of a preemption, which ends with an exception here. The user may have chosen
        # the same number for something else (`--ft-no-restart-exit-code`).
        is_preempted = over.exit_code == ExitCode.PREEMPTED and not self._nodes.is_local
        code = over.exit_code
        if is_preempted:
            code = self._preempted
        if over.judgement is not None and over.judgement.decision.action is Action.GIVE_UP:
            # The state that the job failed from is not written to shared storage.
            self._parts.state_in_memory.mark(over.judgement.decision.set_aside_from, 0)
        self._last_end.cycle = self._ranks.cycle
        self._last_end.record(over.judgement, over.reason, replace(over, exit_code=code))
        if not self._ranks.were_started or is_preempted or over.exit_code == ExitCode.OK:
            return JobEnd(code, over.reason, self._results.stopped())
        # `over.judgement` may be older: a restart after this node's fault, in which another node took its place.
        return JobEnd(code, over.reason, self._results.failed(fault))

    def _after_cut(self) -> JobEnd:
        """Kills the ranks at once and ends: other nodes may form a new group, and these ranks must be gone before.

        There is no SIGTERM first: a rank that saved would live on into the time of the new group. The exit code says
        whether the store was lost, or this node has lost its network.
        """
        assert self._cut is not None
        self._ranks.stop(signal.SIGKILL, 0.0)
        code = int(ExitCode.STORE_HOST_LOST)
        if self._cut.end_reason is CutReason.NO_ROUTE:
            code = int(ExitCode.BELOW_MINIMUM)
        self._parts.recorder.job_over(self._ranks.cycle, self._cut.reason, code)
        return JobEnd(code, self._cut.reason, self._results.stopped())

    def _after_fence(self) -> None:
        """Records that this launcher stood still and its monitors ended the ranks. The next `form` asks for a place.

        The report to the coordinator counts only if the coordinator has not counted this node as lost meanwhile.
        """
        lease, link = self._nodes.lease, self._nodes.node_link
        assert lease is not None and link is not None, "a node that is alone has no lease"
        silent_s = lease.silent_s() or lease.limit_s
        self._parts.times.failed(None)
        self._ranks.stop(signal.SIGKILL, 0.0)
        self._parts.recorder.fenced(self._ranks.cycle, sorted(self._ranks.global_ranks()), silent_s, lease.limit_s)
        reason = f"its launcher stood still for {silent_s:.1f} s, and its monitors ended its ranks"
        self._nodes.report_end(EndReason.LOST, reason)
        # The standstill used up the time in which the store must answer: the node would count as cut off at once.
        link.wake(time.monotonic())
        self._last_end.store(NodeFindings())

    def _after_success(self) -> JobEnd | None:
        """Waits for the other nodes after this one's ranks are done, then leaves.

        1. torch's result is made, and what ranks left running is ended, except background processes.
        2. The success is reported. The coordinator ends the cycle when the last node has reported.
        3. That end is awaited: `--ft-exit-barrier-timeout` seconds at most, but for ever on a node that hosts a store,
           since the ranks of other nodes still need it.
        4. This node leaves, and waits for background processes (`--ft-linger`).

        Returns:
            None when a cycle must follow, since another node's ranks failed.
        """
        result = self._results.succeeded()
        self._nodes.report_end(EndReason.SUCCEEDED, "")
        stop = self._parts.settings.stop
        limit_s = stop.exit_barrier_timeout
        if self._nodes.hosts_store:
            limit_s = math.inf
        try:
            end = self._await_end(limit_s)
        except SignalException as error:
            self._ending.note(int(error.sigval))
            logger.warning("%s; the training is complete here, so this is not a failure", error)
            end = None
        if end is not None and end.exit_code != ExitCode.OK:
            return self._after_late_failure(end)
        self._parts.recorder.cycle_ended(self._ranks.cycle, "succeeded")
        if not self._nodes.numbers_ranks and self._ranks.placement.nodes > 1:
            try:
                self._ending.call(self._exit_barrier)
            except SignalException as error:
                logger.warning("%s; the training is complete, so this is not a failure", error)
        self._departure.after_success()
        self._results.linger()
        return JobEnd(int(ExitCode.OK), "", result)

    def _after_late_failure(self, end: CycleEnd) -> JobEnd | None:
        """Ends what the ranks of this node left, since those of another node failed after these were done.

        A model is trained by all ranks together: those of this node run again, too, from the last checkpoint.
        """
        if self._ending.number is not None:
            return JobEnd(int(ExitCode.PREEMPTED), "", self._results.stopped())
        if end.exit_code is not None:
            return self._over(JobOver(end.exit_code, end.text))
        self._last_end.store(fault_finding.stop_what_is_left(self._ranks))
        return None

    def _await_end(self, limit_s: float) -> CycleEnd | None:
        """Waits for the cycle's end on all nodes; None: not within `limit_s` seconds, or this node is cut off.

        After a signal to the launcher it waits `_ENDS_AFTER_SIGNAL_S` longer at most: other nodes may have got the
        signal as well and report that their ranks are done.

        Raises:
            SignalException: the launcher got a second signal, or Ctrl-C.
        """
        if self._end is None:
            self._end = self._nodes.pop_end()
        if self._end is not None:
            # The end arrived with the end of the last rank, and `poll` has received it: the success came first.
            return self._end
        if self._ending.number is not None:  # A signal arrived while what the ranks had left was stopped.
            limit_s = min(limit_s, _ENDS_AFTER_SIGNAL_S)
        deadline = time.monotonic() + limit_s
        while (left := deadline - time.monotonic()) > 0:
            end = self._nodes.pop_end()
            if end is not None:
                return end
            cut = self._nodes.link.cut(time.monotonic())
            if cut is not None:
                logger.warning("%s; the ranks of this node are done", cut.reason)
                return None
            readable({self._ending.signals.fileno(), *self.descriptors()}, min(left, self._nodes.check_s))
            for number in self._ending.signals.read():
                if self._ending.number is not None or number == signal.SIGINT:
                    raise self._ending.error_without_ranks(number)
                self._ending.note(number)
                deadline = min(deadline, time.monotonic() + _ENDS_AFTER_SIGNAL_S)
        if self._ending.number is not None:
            text = told_to_end(self._ending.number)
            logger.warning("%s; the training is complete here, so this is not a failure", text)
            return None
        logger.warning("the other nodes were not done within %g s (--ft-exit-barrier-timeout)", limit_s)
        return None

    def leave(self, job_end: JobEnd | None) -> None:
        """Leaves the job for good. The agent calls it at the very end, on every path, perhaps twice.

        Args:
            job_end: how the job ended; None: an exception ended the agent.
        """
        self._departure.leave(job_end)
