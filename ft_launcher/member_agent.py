"""The agent of one node among several: what it tells the others, and what it does when they tell it something.

It acts as `agent.py` does; what follows the end of a cycle is the coordinator's decision, which every node carries out.
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

from ft_launcher.agent import NodeAgent, Unhealthy
from ft_launcher.attribution import Fault
from ft_launcher.cycle import Cycle, Phase
from ft_launcher.cycle_store import CycleStore
from ft_launcher.devices import Move
from ft_launcher.job_policy import decision_of, doubt_in, fault_record, forgiven_limit, headline_in
from ft_launcher.node_rendezvous import JobOver, NodeRendezvous
from ft_launcher.nodes.link import Cut
from ft_launcher.nodes.messages import CycleEnd, How, Over, Place
from ft_launcher.restart_history import CycleLife
from ft_launcher.restart_policy import Action, Decision, asked_by, is_known
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.messages import ControlRequest
from rank_monitor.contract.wait import readable

logger = logging.getLogger(__name__)

_TOLD_S = 5.0
_REQUESTS = {"exclude_this_node": How.LEFT, "stop_job": How.STOP, "restart": How.RESTART}


class MemberAgent(NodeAgent):
    """The agent of a node that takes part, or waits as a spare, in a job of several."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        handler = self._rdzv_handler
        assert isinstance(handler, NodeRendezvous)
        self._nodes = handler
        self._end: CycleEnd | None = None
        self._cut: Cut | None = None
        self._found: tuple[Fault, CycleLife] | None = None
        self._ended_cycle = 0
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
        return handler.lease.fileno() if handler.lease.fileno() >= 0 else None

    def _watch_cycle(self) -> Phase:
        self._nodes.attend(True)
        try:
            return super()._watch_cycle()
        finally:
            self._nodes.attend(False)

    def _descriptors(self) -> set[int]:
        return super()._descriptors() | self._nodes.descriptors()

    def _wait_limit(self) -> float | None:
        limit = super()._wait_limit()
        return self._nodes.check_s if limit is None else min(limit, self._nodes.check_s)

    def _may_follow(self, request: ControlRequest) -> bool:
        return is_known(request)

    def _ask_members(self, cycle: Cycle, woken: bool) -> None:
        if self._nodes.lease.silent_s() is not None:
            cycle.on(Phase.FENCED)
            return
        if (end := self._nodes.take_end()) is not None:
            self._end = end
            cycle.on(Phase.REFORM)
        if (cut := self._nodes.cut(time.monotonic())) is not None:
            self._cut = cut
            cycle.on(Phase.CUT_OFF)
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
                self._nodes.tell(How.FAILED, f"the agents could not agree on ranks: {str(error).splitlines()[0]}")
            except RendezvousConnectionError as error:
                if self._nodes.place is None:
                    raise
                raise JobOver(Over(int(ExitCode.STORE_HOST_LOST), str(error))) from None
        place = self._nodes.place
        assert place is not None
        self._tell_story(place)
        if limit := forgiven_limit(place.decision):
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
        """Records the fault that this node brought, with what was decided; or that another's, or nobody's, was."""
        found, self._found = self._found, None
        decision, recorder = decision_of(answer.decision), self._parts.recorder
        ended = self._ended_cycle if self._pcontext is not None else None
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
        """Tells the others at once, so that all nodes stop together; the coordinator decides what follows."""
        hung = self._hangs(group)
        if self._asked is None:
            failed = How.HUNG if hung else How.FAILED
            self._nodes.tell(How.AGREED if self._is_agreed else failed, "a rank failed")
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
        """Another node ended the cycle. A rank of this one may still be the cause: its death is seen late."""
        assert self._end is not None
        if self._end.how == How.PREEMPTED:
            return self._reform_preempted(self._end)
        if self._end.how == How.AGREED:
            self._let_end()
        found = self._end_cycle(group, hung=self._end.how == How.HUNG)
        if self._end.exit_code is not None:
            return self._over(Over(self._end.exit_code, self._end.reason))
        self._bring(found)
        return None

    def _reform_preempted(self, end: CycleEnd) -> RunResult | None:
        """Another node was told to end, and so are the ranks here: they stop together, and nobody is at fault."""
        self._parts.recorder.preempted_elsewhere(self._cycle, end.reason)
        is_signal = end.signal in signal.valid_signals() and end.signal not in (signal.SIGKILL, signal.SIGSTOP)
        self._preempted = self._preempt(end.signal if is_signal else signal.SIGTERM)
        if self._told is not None:
            self._end_as_told()
        if end.exit_code is not None:
            return self._over(Over(end.exit_code, end.reason))
        self._bring(None)
        return None

    def _end_as_told(self) -> NoReturn:
        if self._told != signal.SIGINT and self._running():
            self._nodes.tell(How.PREEMPTED, f"told to end by signal {self._told}", number=self._told or 0)
        super()._end_as_told()

    def _as_asked(self, group: WorkerGroup, rank: int, request: ControlRequest) -> RunResult | None:
        how, reason = _REQUESTS[request.action], asked_by(rank, request)
        if how is How.LEFT:
            decision = Decision(Action.LEAVE, reason, exit_code=int(ExitCode.NODE_EXCLUDED))
        else:
            code = int(ExitCode.JOB_STOPPED) if how is How.STOP else None
            decision = Decision(Action.GIVE_UP if code else Action.RESTART, reason, exit_code=code)
            self._nodes.tell(how, reason, code or 0)
        self._parts.recorder.asked(self._cycle, request, decision)
        if decision.action is Action.RESTART:
            return None
        self.exit_code, self.reason = decision.exit_code, decision.reason
        self._why_leaving = reason
        return self._stopped()

    def _over(self, over: Over) -> RunResult:
        """The job is over for this node."""
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
        """Others may form a new group without this node: its ranks must be gone before."""
        assert self._cut is not None
        self._stop_ranks(signal.SIGKILL, 0.0)
        lost = ExitCode.BELOW_MINIMUM if self._cut.unreachable else ExitCode.STORE_HOST_LOST
        self.exit_code, self.reason = int(lost), self._cut.reason
        self._parts.recorder.job_over(self._cycle, self._cut.reason, self.exit_code)
        return self._stopped()

    def _after_fence(self, group: WorkerGroup) -> RunResult | None:
        """This launcher stood still, and its ranks were ended. It takes part again as a newcomer, if it still can.

        What it tells counts only where it was not counted as lost meanwhile.
        """
        lease = self._nodes.lease
        silent_s = lease.silent_s() or lease.limit_s
        ranks = sorted(int(worker.global_rank) for worker in group.workers)
        self._stop_ranks(signal.SIGKILL, 0.0)
        self._parts.recorder.fenced(self._cycle, ranks, silent_s, lease.limit_s)
        self._nodes.tell(How.LOST, f"its launcher stood still for {silent_s:.1f} s, and its monitors ended its ranks")
        self._nodes.wake()
        self._bring(None)
        return None

    def _succeed(self, group: WorkerGroup) -> RunResult | None:
        """The ranks of this node are done. None when the others are not, and the group must form again."""
        result = self._take_results(group)
        self._nodes.tell(How.SUCCEEDED, "")
        try:
            end = self._await_end(self._parts.settings.stop.exit_barrier_timeout)
        except SignalException as told:
            self._told = self._told or int(told.sigval)
            logger.warning("%s; the training is complete here, so this is no failure", told)
            end = None
        if end is not None and end.how != How.SUCCEEDED:
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
        """The cycle's end for all nodes; None: it was not told within `limit_s`, or this node is cut off.

        When the launcher is told to end, it waits a little longer: the ranks may have been, and be done for that.

        Raises:
            SignalException: the launcher was told to end twice, or by Ctrl-C.
        """
        deadline = time.monotonic() + limit_s
        while (left := deadline - time.monotonic()) > 0:
            if (end := self._nodes.take_end()) is not None:
                return end
            if (cut := self._nodes.cut(time.monotonic())) is not None:
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
