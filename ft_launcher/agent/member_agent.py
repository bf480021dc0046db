"""The agent of one node among several: reports to the coordinator and carries out what that decides.

Made by `composition.py` in the place of `NodeAgent` when the job's rendezvous is ours. Does not decide what follows
the end of a cycle: the coordinator does, once for all nodes.
"""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import replace
from typing import Any, NoReturn

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from ft_launcher.agent.node_agent import NodeAgent, Unhealthy
from ft_launcher.attribution import Fault
from ft_launcher.cycle.cycle import Cycle, CyclePhase
from ft_launcher.nodes.link import Cut
from ft_launcher.nodes.messages import CycleEnd, EndReason, Over, Place
from ft_launcher.policy.job_policy import decision_of, doubt_in, fault_record, forgiven_limit, headline_in
from ft_launcher.policy.restart_history import CycleLife
from ft_launcher.policy.restart_policy import Action, Decision, asked_by, is_known
from ft_launcher.ranks.devices import Move
from ft_launcher.rendezvous.cycle_store import CycleStore
from ft_launcher.rendezvous.handler import JobOver, NodeRendezvous
from rank_monitor.contract.errors import one_line
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.wire.messages import ControlRequest

logger = logging.getLogger(__name__)

# Seconds after a signal in which the other nodes' end may arrive. The training is complete here: nothing else is lost.
_TOLD_S = 5.0
# The actions of `ControlRequest`, as the client names them, and how the coordinator hears of each.
_REQUESTS = {"exclude_this_node": EndReason.LEFT, "stop_job": EndReason.STOP, "restart": EndReason.RESTART}


class MemberAgent(NodeAgent):
    """The agent of a node that takes part in a job of several nodes, or waits in it as a spare."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        handler = self._rdzv_handler
        assert isinstance(handler, NodeRendezvous)
        self._nodes = handler
        self._end: CycleEnd | None = None
        self._cut: Cut | None = None
        self._found: tuple[Fault, CycleLife] | None = None
        self._ended_cycle = 0
        # The code of a preemption in which no rank was left to be killed; `_preempt` says when it is another.
        self._preempted = int(ExitCode.PREEMPTED)
        self._why_leaving = "its launcher ends"

    # The cycle loop.

    def _invoke_run(self, role: str = "") -> RunResult:
        try:
            return super()._invoke_run(role)
        except JobOver as over:
            return self._over(over.over)

    def _lease(self) -> int | None:
        handler = self._rdzv_handler
        assert isinstance(handler, NodeRendezvous)
        if handler.lease.fileno() >= 0:
            return handler.lease.fileno()
        return None

    def _watch_cycle(self) -> CyclePhase:
        self._nodes.attend(True)
        try:
            return super()._watch_cycle()
        finally:
            self._nodes.attend(False)

    def _descriptors(self) -> set[int]:
        return super()._descriptors() | self._nodes.descriptors()

    def _wait_limit(self) -> float | None:
        limit = super()._wait_limit()
        if limit is None:
            return self._nodes.check_s
        # A node that is cut off must notice that before others count it as lost, so it asks also without any event.
        return min(limit, self._nodes.check_s)

    def _may_follow(self, request: ControlRequest) -> bool:
        return is_known(request)

    def _ask_members(self, cycle: Cycle, woken: bool) -> None:
        # Before anything else: the lease ran out, so the monitors have ended the ranks of this cycle or are about to.
        if self._nodes.lease.silent_s() is not None:
            cycle.on(CyclePhase.FENCED)
            return
        end = self._nodes.take_end()
        if end is not None:
            self._end = end
            cycle.on(CyclePhase.REFORM)
        cut = self._nodes.cut(time.monotonic())
        if cut is not None:
            self._cut = cut
            cycle.on(CyclePhase.CUT_OFF)
        elif (trouble := self._nodes.trouble()) is not None:
            self._parts.recorder.store_silent(trouble)

    # Forming a cycle.

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._end = self._cut = None
        while True:
            try:
                super()._rendezvous(worker_group)
                break
            except (DistStoreError, DistNetworkError) as error:
                # The node that hosts the cycle's store may have died since: the coordinator forms another cycle.
                self._nodes.tell(EndReason.FAILED, f"the agents could not agree on ranks: {one_line(error)}")
            except RendezvousConnectionError as error:
                # Before its first place this node may never have reached the store: not a lost host.
                if self._nodes.place is None:
                    raise
                raise JobOver(Over(int(ExitCode.STORE_HOST_LOST), str(error))) from None
        place = self._nodes.place
        assert place is not None
        self._tell_story(place)
        limit = forgiven_limit(place.decision)
        if limit:
            self._forgive_learned_limit(limit)
        self._move = Move(doubt_in(place.decision))

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        worker_group.store = self._store = None  # ranks are assigned: its connection is one of the host's descriptors
        return pids

    def _names(self) -> tuple[list[str], list[str]]:
        place = self._nodes.place
        assert place is not None
        return place.active, place.standby

    def _must_be_healthy(self) -> None:
        try:
            super()._must_be_healthy()
        except Unhealthy as unhealthy:
            found, self._found = self._found, None
            if found is not None:  # nobody else will hear of it
                decision = Decision(Action.LEAVE, str(unhealthy), exit_code=int(ExitCode.NODE_UNHEALTHY))
                self._parts.recorder.failed(self._cycle, found[0], decision, found[1])
            raise

    def _open_store(self, group: WorkerGroup) -> CycleStore:
        assert self._nodes.cycle_store is not None
        return self._nodes.cycle_store

    def _tell_story(self, answer: Place | Over) -> None:
        """Records why the last cycle ended, with the coordinator's decision.

        The fault of this node is recorded in full where the decision is about it. Otherwise the headline of the other
        node's fault is recorded, or the reason for the new formation.
        """
        found, self._found = self._found, None
        decision, recorder = decision_of(answer.decision), self._parts.recorder
        if self._pcontext is not None:
            ended = self._ended_cycle
        else:
            ended = None
        # Of several faults of one cycle the coordinator decided about one; only its node records all of it.
        if found is not None and decision is not None and answer.fault_of == self._nodes.node:
            recorder.failed(self._ended_cycle, found[0], decision, found[1])
        elif ended is not None and decision is not None:
            recorder.failed_elsewhere(ended, headline_in(answer.decision), decision)
        elif isinstance(answer, Over):
            if answer.exit_code != ExitCode.OK:
                recorder.job_over(ended, answer.reason, answer.exit_code)
        elif ended is not None:
            recorder.reform(ended, answer.reason)

    # Ending a cycle.

    def _after_failure(self, group: WorkerGroup) -> RunResult | None:
        """Reports the failure, stops this node's ranks and keeps the fault for the next arrival.

        The report goes out before the stop, so that all nodes stop together; the coordinator decides what follows.
        """
        hung = self._hangs(group)
        # A request is reported by `_as_asked`, with what it asks for.
        if self._asked is None:
            if hung:
                failed = EndReason.HUNG
            else:
                failed = EndReason.FAILED
            self._nodes.tell(EndReason.AGREED if self._is_agreed else failed, "a rank failed")
        if self._is_agreed:
            self._let_end()
        found = self._end_cycle(group, hung)
        if self._asked is not None:
            return self._as_asked(group, *self._asked)
        self._bring(found)
        return None

    def _bring(self, found: tuple[Fault, CycleLife] | None) -> None:
        self._found, self._ended_cycle = found, self._cycle
        if found is not None:
            self._nodes.bring(fault_record(*found, self._parts.recorder.headline(found[0])))

    def _reform(self, group: WorkerGroup) -> RunResult | None:
        """Ends a cycle that another node ended; returns a result when the job is over for this node.

        A rank of this node may still be the cause, when its death is noticed late: so the fault is looked for here too.
        """
        assert self._end is not None
        if self._end.how == EndReason.PREEMPTED:
            return self._reform_preempted(self._end)
        if self._end.how == EndReason.AGREED:
            self._let_end()
        found = self._end_cycle(group, hung=self._end.how == EndReason.HUNG)
        if self._end.exit_code is not None:
            return self._over(Over(self._end.exit_code, self._end.reason))
        self._bring(found)
        return None

    def _reform_preempted(self, end: CycleEnd) -> RunResult | None:
        """Ends the ranks because another node got a signal to end: all stop together, and no fault is recorded."""
        self._parts.recorder.preempted_elsewhere(self._cycle, end.reason)
        # The number comes from another node. Signals that cannot be handled would give the ranks no time to save.
        is_signal = end.signal in signal.valid_signals() and end.signal not in (signal.SIGKILL, signal.SIGSTOP)
        self._preempted = self._preempt(end.signal if is_signal else signal.SIGTERM)
        if self._told is not None:
            self._end_as_told()
        if end.exit_code is not None:
            return self._over(Over(end.exit_code, end.reason))
        self._bring(None)
        return None

    def _end_as_told(self) -> NoReturn:
        # Ctrl-C is no preemption: it ends this node, and the others learn of it when the node leaves.
        if self._told != signal.SIGINT and self._running():
            self._nodes.tell(EndReason.PREEMPTED, f"told to end by signal {self._told}", number=self._told or 0)
        super()._end_as_told()

    def _as_asked(self, group: WorkerGroup, rank: int, request: ControlRequest) -> RunResult | None:
        how, reason = _REQUESTS[request.action], asked_by(rank, request)
        if how is EndReason.LEFT:
            decision = Decision(Action.LEAVE, reason, exit_code=int(ExitCode.NODE_EXCLUDED))
        else:
            if how is EndReason.STOP:
                code = int(ExitCode.JOB_STOPPED)
            else:
                code = None
            decision = Decision(Action.GIVE_UP if code else Action.RESTART, reason, exit_code=code)
            self._nodes.tell(how, reason, code or 0)
        self._parts.recorder.asked(self._cycle, request, decision)
        if decision.action is Action.RESTART:
            return None
        self.exit_code, self.reason = decision.exit_code, decision.reason
        self._why_leaving = reason
        return self._stopped()

    def _over(self, over: Over) -> RunResult:
        """Records the end of the job for this node; returns torch's result."""
        found, decision = self._found, decision_of(over.decision)
        is_preempted = over.exit_code == ExitCode.PREEMPTED
        self.exit_code, self.reason = over.exit_code, over.reason
        if is_preempted:
            self.exit_code = self._preempted
        self._ended_cycle = self._cycle
        self._tell_story(replace(over, exit_code=self.exit_code))
        if self._pcontext is None or is_preempted or over.exit_code == ExitCode.OK:
            return self._stopped()
        decision = decision or Decision(Action.GIVE_UP, over.reason, exit_code=over.exit_code)
        return self._give_up(self._worker_group, found[0] if found else None, decision)

    def _after_cut(self, group: WorkerGroup) -> RunResult:
        """Kills the ranks at once and ends: other nodes may form a new group, and these ranks must be gone before."""
        assert self._cut is not None
        self._stop_ranks(signal.SIGKILL, 0.0)
        if self._cut.unreachable:
            lost = ExitCode.BELOW_MINIMUM
        else:
            lost = ExitCode.STORE_HOST_LOST
        self.exit_code, self.reason = int(lost), self._cut.reason
        self._parts.recorder.job_over(self._cycle, self._cut.reason, self.exit_code)
        return self._stopped()

    def _after_fence(self, group: WorkerGroup) -> RunResult | None:
        """Records that this launcher stood still and its monitors ended the ranks; then joins again as a newcomer.

        Its report counts only if the coordinator has not counted this node as lost meanwhile.
        """
        lease = self._nodes.lease
        silent_s = lease.silent_s() or lease.limit_s
        ranks = sorted(int(worker.global_rank) for worker in group.workers)
        self._stop_ranks(signal.SIGKILL, 0.0)
        self._parts.recorder.fenced(self._cycle, ranks, silent_s, lease.limit_s)
        self._nodes.tell(
            EndReason.LOST, f"its launcher stood still for {silent_s:.1f} s, and its monitors ended its ranks"
        )
        # The standstill used up the time in which the store must answer: the node would count as cut off at once.
        self._nodes.wake()
        self._bring(None)
        return None

    def _succeed(self, group: WorkerGroup) -> RunResult | None:
        """Waits for the other nodes after this one's ranks are done, then leaves.

        Returns:
            None when a cycle must follow, since another node's ranks failed.
        """
        result = self._take_results(group)
        # Reported before the wait: the coordinator ends the cycle when the last node has.
        self._nodes.tell(EndReason.SUCCEEDED, "")
        try:
            end = self._await_end(self._parts.settings.stop.exit_barrier_timeout)
        except SignalException as told:
            self._told = self._told or int(told.sigval)
            logger.warning("%s; the training is complete here, so this is no failure", told)
            end = None
        if end is not None and end.how != EndReason.SUCCEEDED:
            self._end = end
            if self._told is not None:
                self.exit_code = int(ExitCode.PREEMPTED)
                return self._stopped()
            if end.exit_code is None:
                self._parts.recorder.reform(self._cycle, end.reason)
                self._stop_workers(group)
                return None
            return self._over(Over(end.exit_code, end.reason))
        self._parts.recorder.cycle_ended(self._cycle, "succeeded")
        self._nodes.leave(self._why_leaving, self._parts.settings.stop.exit_barrier_timeout)
        self._linger()
        self.exit_code = int(ExitCode.OK)
        return result

    def _await_end(self, limit_s: float) -> CycleEnd | None:
        """Waits for the cycle's end on all nodes; None: not within `limit_s` seconds, or this node is cut off.

        After a signal to the launcher it waits `_TOLD_S` longer at most: other nodes may have got the signal as well
        and report that their ranks are done.

        Raises:
            SignalException: the launcher got a second signal, or Ctrl-C.
        """
        deadline = time.monotonic() + limit_s
        while (left := deadline - time.monotonic()) > 0:
            end = self._nodes.take_end()
            if end is not None:
                return end
            cut = self._nodes.cut(time.monotonic())
            if cut is not None:
                logger.warning("%s; the ranks of this node are done", cut.reason)
                return None
            readable({self._parts.signals.fileno(), *self._nodes.descriptors()}, min(left, self._nodes.check_s))
            for number in self._parts.signals.read():
                if self._told is not None or number == signal.SIGINT:
                    self._raise_told(number)
                self._told, deadline = number, min(deadline, time.monotonic() + _TOLD_S)
        if self._told is not None:
            logger.warning("told to end by signal %d; the training is complete here, so this is no failure", self._told)
            return None
        logger.warning("the other nodes were not done within %g s (--ft-exit-barrier-timeout)", limit_s)
        return None

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        super()._shutdown(*args, **kwargs)
        if self.exit_code == ExitCode.NODE_UNHEALTHY:
            self._why_leaving = self.reason
        if self.exit_code == ExitCode.OK:
            self._nodes.leave(self._why_leaving, self._parts.settings.stop.exit_barrier_timeout)
        else:
            self._nodes.leave(self._why_leaving)
        self._nodes.lease.close()
