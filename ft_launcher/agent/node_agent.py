"""The node agent: torch elastic's local agent with a cycle loop of our own that waits for events.

torch's launcher runs it. It carries out and decides nothing: `cycle/cycle.py` says when a cycle has ended,
`attribution/` why, `policy/` what follows. Uses torch's underscored hooks `_invoke_run`, `_rendezvous`, and
`_exit_barrier`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.multiprocessing import SignalException

from ft_launcher.agent.rank_agent import RankAgent
from ft_launcher.attribution import Fault, FaultClass, FaultKind, NodeEvidence
from ft_launcher.cycle import stop_wait
from ft_launcher.cycle.cause_wait import await_cause
from ft_launcher.cycle.cycle import Cycle, CyclePhase
from ft_launcher.cycle.evidence import fault_in, gather
from ft_launcher.health.reading import judge
from ft_launcher.policy.restart_policy import Action, Decision, after_request, decide, with_decision
from ft_launcher.processes.descriptors import Reserve
from ft_launcher.ranks.devices import Move, another_device
from ft_launcher.rendezvous import cycle_store
from ft_launcher.rendezvous.cycle_store import CycleStore
from ft_launcher.settings.rank_count import gpu_uuids
from rank_monitor.contract.exit_codes import AGREED, ExitCode
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.wire.messages import ControlRequest

logger = logging.getLogger(__name__)


class Unhealthy(Exception):
    """A health check found that this node must not take part in a further cycle; the text says why."""


class NodeAgent(RankAgent):
    """Forms the cycles of this node, watches them, and carries out the decision after each."""

    def _invoke_run(self, role: str = "") -> RunResult:
        reserve = Reserve(self._nprocs)
        try:
            return self._run_cycles(reserve)
        except Unhealthy as unhealthy:
            self.exit_code, self.reason = int(ExitCode.NODE_UNHEALTHY), f"this node is unhealthy: {unhealthy}"
            return self._stopped()
        finally:
            reserve.release()  # `launch()` goes on in the user's program

    def _run_cycles(self, reserve: Reserve) -> RunResult:
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            reserve.fill()
            phase = self._watch_cycle()
            self._await_descriptors(reserve)
            if self._told is not None:
                # A signal wins over whatever ended the cycle meanwhile: who sent it will not wait for a restart.
                phase = CyclePhase.TOLD_TO_END
            match phase:
                case CyclePhase.SUCCEEDED:
                    result = self._succeed(group)
                case CyclePhase.FAILED | CyclePhase.ASKED:
                    result = self._after_failure(group)
                case CyclePhase.REFORM:
                    result = self._reform(group)
                case CyclePhase.CUT_OFF:
                    result = self._after_cut(group)
                case CyclePhase.FENCED:
                    result = self._after_fence(group)
                case _:
                    self._end_as_told()
            if result is not None:
                return result
            self._initialize_workers(group)

    def _await_descriptors(self, reserve: Reserve) -> None:
        """Waits until enough descriptors are free for the steps after a cycle, or the launcher gets a signal to end."""

        def wait(limit_s: float) -> int | None:
            self._told = self._told or self._parts.signals.wait(limit_s)
            return self._told

        reserve.await_enough(wait)

    def _watch_cycle(self) -> CyclePhase:
        """Waits for events until the cycle has ended; returns the phase in which it ended."""
        cycle, self._asked = Cycle(self._nprocs), None
        while cycle.phase is CyclePhase.RUNNING:
            # The end of a rank wakes this by its pidfd; the limit is for checks that have no descriptor.
            ready = readable(self._descriptors(), self._wait_limit())
            for number in self._parts.signals.read():
                self._told = self._told or number
                cycle.on(CyclePhase.TOLD_TO_END)
            self._parts.zygotes.handle()
            self._ranks.attend()
            unreaped = self._zombies.unreaped
            # Ranks that ended without an exit code so far are tried again at each event.
            self._take_ends(cycle, [rank for rank, fd in self._running().items() if fd in ready or rank in unreaped])
            self._warnings.attend(self._cycle, self._worker_group.workers)
            self._ask_members(cycle, bool(ready))
        return cycle.phase

    def _take_ends(self, cycle: Cycle, ended: list[int]) -> None:
        """Takes the monitors' messages, then the exit codes of the local ranks in `ended`, and lets rung 1 act on both.

        In this order, since a verdict or an exception explains the death that follows it.
        """
        self._hear(cycle)
        # What a rank sent just before its death may still be with its monitor; the answer to a snapshot comes after it.
        if self._rung_one.needs_words(ended):
            self._monitors.snapshots()
            self._hear(cycle)
        for local_rank in ended:
            end = self._ranks.reap(local_rank)
            if end is None:
                self._zombies.unreaped.add(local_rank)
            else:
                self._zombies.unreaped.discard(local_rank)
                self._parts.recorder.rank_ended(self._cycle, self._global(local_rank), end.exit_code)
                cycle.on(self._rung_one.ended(local_rank, end.exit_code))
        for event in self._rung_one.attend():
            cycle.on(event)
        if self._zombies.attend(self._ranks):
            cycle.on(CyclePhase.FAILED)

    def _ask_members(self, cycle: Cycle, woken: bool) -> None:
        """Asks torch's rendezvous whether nodes wait to join, which is an operation on its store."""
        # Events are never delayed by a store operation, which may take as long as the network does.
        if woken or not self._parts.several_nodes:
            return
        try:
            if self._rdzv_handler.num_nodes_waiting() > 0:
                cycle.on(CyclePhase.REFORM)
        except Exception as error:  # the training is healthy: a store that does not answer ends nothing
            self._parts.recorder.store_silent(error)

    def _descriptors(self) -> set[int]:
        ours = self._monitors.descriptors() | self._parts.zygotes.descriptors() | self._parts.injected.descriptors()
        ours |= self._ranks.descriptors() | self._rung_one.descriptors()
        pidfds = {pidfd for rank, pidfd in self._running().items() if rank not in self._zombies.unreaped}
        return {self._parts.signals.fileno(), *pidfds, *ours}

    def _wait_limit(self) -> float | None:
        """How long to wait for an event (seconds); None: without limit.

        With several nodes it is the monitor interval at most: torch's rendezvous must be polled for new members.
        """
        sources = (self._monitors, self._ranks, self._rung_one, self._zombies, self._warnings)
        moments = [moment for source in sources if (moment := source.next_check()) is not None]
        checks = [moment - time.monotonic() for moment in moments]
        if self._parts.several_nodes:
            checks.append(float(self._worker_group.spec.monitor_interval))
        if checks:
            return max(0.0, min(checks))
        return None

    # Forming a cycle.

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._must_be_healthy()
        form = super()._rendezvous
        self._aside(lambda: form(worker_group))
        self._store_of_cycle = self._aside(lambda: self._open_store(worker_group))
        worker_group.master_addr = self._store_of_cycle.host
        worker_group.master_port = self._store_of_cycle.master_port
        # For `TORCHELASTIC_RESTART_COUNT`: torch computes it from this, and it is the number of the cycle on all nodes.
        self._remaining_restarts = worker_group.spec.max_restarts - self._store_of_cycle.cycle
        if worker_group.group_rank == 0:
            self._parts.cycle_info.begin(self._store_of_cycle.cycle, *self._names())

    def _names(self) -> tuple[list[str], list[str]]:
        """Host names of the cycle's nodes, by rank, and of waiting nodes; both empty with torch's own handlers."""
        return ([] if self._parts.several_nodes else [socket.gethostname()]), []

    def _must_be_healthy(self) -> None:
        """Checks the health of this node; then waits, within bounds, until the memory of its GPUs is free again.

        Raises:
            Unhealthy: a check found this node unfit.
        """
        try:
            self._parts.memory.begin()
            readings = self._aside(self._parts.health.check)
            verdict = judge(readings)
            self._parts.recorder.checked(self._cycle, readings, verdict)
            if not verdict.healthy:
                raise Unhealthy(verdict.reason)
            self._parts.recorder.memory_kept(self._cycle, self._aside(self._parts.memory.wait))
        finally:
            self._parts.health.close()
            self._parts.memory.close()

    def _open_store(self, group: WorkerGroup) -> CycleStore:
        attempt, self._attempt = self._attempt, self._attempt + 1
        if group.group_rank == 0:
            run_id = self._rdzv_handler.get_run_id()
            ports, shared = self._parts.ports, self._rdzv_handler.use_agent_store
            return cycle_store.publish(group.store, ports, group.master_addr, run_id, attempt, shared)
        return cycle_store.learn(group.store)

    # What follows its end.

    def _reform(self, group: WorkerGroup) -> RunResult | None:
        """Stops the ranks of a healthy cycle, since the group is to form anew."""
        self._parts.recorder.reform(self._cycle)
        self._stop_workers(group)
        return None

    def _after_cut(self, group: WorkerGroup) -> RunResult:
        # Only `MemberAgent` gets phases CUT_OFF and FENCED.
        raise AssertionError("one node is never cut off, and torch's handlers do not tell")

    def _after_fence(self, group: WorkerGroup) -> RunResult | None:
        raise AssertionError("one node has no lease, and neither has one with torch's handlers")

    def _succeed(self, group: WorkerGroup) -> RunResult | None:
        result = self._take_results(group)
        self._parts.recorder.cycle_ended(self._cycle, "succeeded")
        if group.group_world_size > 1:
            try:
                self._aside(super()._exit_barrier)
            except SignalException as told:
                self._told = int(told.sigval)
                logger.warning("%s; the training is complete, so this is no failure", told)
        self._linger()
        self.exit_code = int(ExitCode.OK)
        return result

    def _after_failure(self, group: WorkerGroup) -> RunResult | None:
        """Stops the ranks, attributes the fault, carries out the decision. Returns a result when the job ends here."""
        if self._is_agreed:
            self._let_end()
        elif self._asked is None and not self._parts.several_nodes:
            told = self._parts.signals.fileno()
            await_cause(group.workers, self._ranks, self._monitors, told, lambda: self._hear(None))
        # Asked before the stop: afterwards each rank has ended, and nothing tells who hung.
        found = self._end_cycle(group, hung=self._hangs(group))
        if self._asked is not None:
            return self._as_asked(group, *self._asked)
        assert found is not None, "a cycle failed without a failed rank"
        fault, life = found
        restart, now = self._parts.settings.restart, time.monotonic()
        history = self._history.ended(fault, life, restart, now)
        move = another_device(fault.doubt, self._nprocs, os.environ, gpu_uuids(), self._move)
        decision = decide(fault, history, restart, group.spec.max_restarts, now, elsewhere=move is not None)
        self._history = with_decision(history, decision, now)
        self._parts.recorder.failed(self._cycle, fault, decision, life)
        if decision.action is Action.RESTART:
            self._move = move or Move(visible=self._move.visible)
            self._forgive_learned_limit(fault.limit if fault.learned_limit else "")
            # The wait of a backoff; a signal must end the launcher at once in it.
            number = self._parts.signals.wait(decision.wait_s)
            if number is not None:
                self._raise_told(number)
            return None
        return self._give_up(group, fault, decision)

    def _hangs(self, group: WorkerGroup) -> bool:
        """Whether the cycle failed by a hang, as far as is known before the other ranks are stopped."""
        if self._asked is not None:
            return False
        fault = fault_in(gather(group.workers, self._ranks, self._monitors), NodeEvidence())
        aborted = fault is not None and fault.exit_code == -signal.SIGABRT  # by NCCL's watchdog, perhaps
        return fault is None or fault.kind is FaultKind.HANG or fault.fault_class is FaultClass.HANG or aborted

    def _forgive_learned_limit(self, limit: str) -> None:
        """Doubles the learned limit that killed a rank, for every rank of the next cycle. Empty: resets all limits."""
        if limit:
            self._multipliers = {limit: 2 * self._multipliers.get(limit, 1)}
        else:
            self._multipliers = {}
        if limit:
            self._parts.recorder.limit_doubled(limit, self._multipliers[limit])

    @property
    def _is_agreed(self) -> bool:
        """Whether a rank exited with a code by which all ranks leave together: the others are about to exit too."""
        return any(end.exit_code in AGREED for end in self._ranks.exits.values())

    def _let_end(self) -> None:
        """Waits until ranks that have agreed to exit have saved and ended, for `--workers-stop-timeout` at most.

        Raises:
            SignalException: the launcher got a signal to end meanwhile.
        """
        stop_wait.wait(self._ranks, self._parts.settings.stop.workers_stop_timeout, self._parts.signals, self._heed)
        if self._told is not None:
            self._end_as_told()

    def _give_up(self, group: WorkerGroup, fault: Fault | None, decision: Decision) -> RunResult:
        """Returns the result of a job that is given up. `fault` is None when no rank of this node failed by itself."""
        self.exit_code, self.reason = decision.exit_code, decision.reason
        if fault is None:
            return self._stopped()
        return self._failures(group, fault)

    def _as_asked(self, group: WorkerGroup, rank: int, request: ControlRequest) -> RunResult | None:
        """Carries out a rank's request after the ranks have ended; returns a result when this launcher ends."""
        policy, now = self._parts.settings.restart, time.monotonic()
        decision = after_request(request, rank, self._history, policy, group.spec.max_restarts, now)
        self._parts.recorder.asked(self._cycle, request, decision)
        if decision.action is Action.RESTART:
            return None
        self.exit_code, self.reason = decision.exit_code, decision.reason
        return self._stopped()
