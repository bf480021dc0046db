"""The node agent: torch elastic's local agent with a cycle loop of our own that waits for events.

It acts: `cycle.py` says when a cycle has ended, `attribution.py` why, `restart_policy.py` what follows. Uses torch's
underscored hooks `_invoke_run`, `_rendezvous`, `_exit_barrier`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.multiprocessing import SignalException

from ft_launcher import cycle_store, grace
from ft_launcher.attribution import Fault, FaultClass, FaultKind, NodeEvidence
from ft_launcher.cycle import Cycle, Phase
from ft_launcher.cycle_store import CycleStore
from ft_launcher.descriptors import Reserve
from ft_launcher.devices import Move, another_device
from ft_launcher.evidence import fault_in, gather
from ft_launcher.health.reading import judge
from ft_launcher.last_words import await_cause
from ft_launcher.rank_agent import RankAgent
from ft_launcher.rank_count import gpu_uuids
from ft_launcher.restart_policy import Action, Decision, after_request, decide
from rank_monitor.contract.exit_codes import AGREED, ExitCode
from rank_monitor.contract.messages import ControlRequest
from rank_monitor.contract.wait import readable

logger = logging.getLogger(__name__)


class Unhealthy(Exception):
    """This node must not take part in a further cycle."""


class NodeAgent(RankAgent):
    """The agent of this node: forms cycles, watches them, and does what is decided after each."""

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
                phase = Phase.TOLD_TO_END
            match phase:
                case Phase.SUCCEEDED:
                    result = self._succeed(group)
                case Phase.FAILED | Phase.ASKED:
                    result = self._after_failure(group)
                case Phase.REFORM:
                    result = self._reform(group)
                case Phase.CUT_OFF:
                    result = self._after_cut(group)
                case Phase.FENCED:
                    result = self._after_fence(group)
                case _:
                    self._end_as_told()
            if result is not None:
                return result
            self._initialize_workers(group)

    def _await_descriptors(self, reserve: Reserve) -> None:
        """Waits until what follows a cycle can open descriptors, or the launcher is told to end."""

        def wait(limit_s: float) -> int | None:
            self._told = self._told or self._parts.signals.wait(limit_s)
            return self._told

        reserve.await_enough(wait)

    def _watch_cycle(self) -> Phase:
        """Waits for events until the cycle has ended."""
        cycle, self._asked = Cycle(self._nprocs), None
        while cycle.phase is Phase.RUNNING:
            ready = readable(self._descriptors(), self._wait_limit())
            for number in self._parts.signals.read():
                self._told = self._told or number
                cycle.on(Phase.TOLD_TO_END)
            self._parts.zygotes.handle()
            self._ranks.attend()
            unreaped = self._zombies.unreaped
            self._take_ends(cycle, [rank for rank, fd in self._running().items() if fd in ready or rank in unreaped])
            self._warnings.attend(self._cycle, self._worker_group.workers)
            self._ask_members(cycle, bool(ready))
        return cycle.phase

    def _take_ends(self, cycle: Cycle, ended: list[int]) -> None:
        """Hears the monitors, then takes the exit codes of ranks that ended, and does what rung 1 makes of both."""
        self._hear(cycle)
        if self._rung_one.needs_words(ended):
            self._monitors.snapshots()
            self._hear(cycle)
        for local_rank in ended:
            if (end := self._ranks.reap(local_rank)) is None:
                self._zombies.unreaped.add(local_rank)
            else:
                self._zombies.unreaped.discard(local_rank)
                self._parts.recorder.rank_ended(self._cycle, self._global(local_rank), end.exit_code)
                cycle.on(self._rung_one.ended(local_rank, end.exit_code))
        for event in self._rung_one.attend():
            cycle.on(event)
        if self._zombies.attend(self._ranks):
            cycle.on(Phase.FAILED)

    def _ask_members(self, cycle: Cycle, woken: bool) -> None:
        """Asks what the other nodes want; torch's handlers know it after a store operation."""
        if woken or not self._parts.several_nodes:
            return
        try:
            if self._rdzv_handler.num_nodes_waiting() > 0:
                cycle.on(Phase.REFORM)
        except Exception as error:  # the training is healthy: a store that does not answer ends nothing
            self._parts.recorder.store_silent(error)

    def _descriptors(self) -> set[int]:
        ours = self._monitors.descriptors() | self._parts.zygotes.descriptors() | self._parts.injected.descriptors()
        ours |= self._ranks.descriptors() | self._rung_one.descriptors()
        pidfds = {pidfd for rank, pidfd in self._running().items() if rank not in self._zombies.unreaped}
        return {self._parts.signals.fileno(), *pidfds, *ours}

    def _wait_limit(self) -> float | None:
        """How long to wait for an event; with several nodes, torch's membership is asked each monitor interval."""
        sources = (self._monitors, self._ranks, self._rung_one, self._zombies, self._warnings)
        moments = [moment for source in sources if (moment := source.next_check()) is not None]
        checks = [moment - time.monotonic() for moment in moments]
        if self._parts.several_nodes:
            checks.append(float(self._worker_group.spec.monitor_interval))
        return max(0.0, min(checks)) if checks else None

    # Forming a cycle.

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._must_be_healthy()
        form = super()._rendezvous
        self._aside(lambda: form(worker_group))
        self._store_of_cycle = self._aside(lambda: self._open_store(worker_group))
        worker_group.master_addr = self._store_of_cycle.host
        worker_group.master_port = self._store_of_cycle.master_port
        self._remaining_restarts = worker_group.spec.max_restarts - self._store_of_cycle.cycle
        if worker_group.group_rank == 0:
            self._parts.cycle_info.begin(self._store_of_cycle.cycle, *self._names())

    def _names(self) -> tuple[list[str], list[str]]:
        """Host names of the nodes of the cycle, by rank, and of those that wait; torch's handlers do not give them."""
        return ([] if self._parts.several_nodes else [socket.gethostname()]), []

    def _must_be_healthy(self) -> None:
        """Raises `Unhealthy` when a check of this node says that; waits until its GPUs have their memory back."""
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
        """Ends a healthy cycle, since the group is to form anew."""
        self._parts.recorder.reform(self._cycle)
        self._stop_workers(group)
        return None

    def _after_cut(self, group: WorkerGroup) -> RunResult:
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
        """Stops the others, finds out what happened and decides; a result when the job ends here."""
        if self._is_agreed:
            self._let_end()
        elif self._asked is None and not self._parts.several_nodes:
            told = self._parts.signals.fileno()
            await_cause(group.workers, self._ranks, self._monitors, told, lambda: self._hear(None))
        found = self._end_cycle(group, hung=self._hangs(group))
        if self._asked is not None:
            return self._as_asked(group, *self._asked)
        assert found is not None, "a cycle failed without a failed rank"
        fault, life = found
        restart, now = self._parts.settings.restart, time.monotonic()
        history = self._history.ended(fault, life, restart, now)
        move = another_device(fault.doubt, self._nprocs, os.environ, gpu_uuids(), self._move)
        decision = decide(fault, history, restart, group.spec.max_restarts, now, elsewhere=move is not None)
        self._history = history.after(decision, now)
        self._parts.recorder.failed(self._cycle, fault, decision, life)
        if decision.action is Action.RESTART:
            self._move = move or Move(visible=self._move.visible)
            self._forgive_learned_limit(fault.limit if fault.learned_limit else "")
            if (number := self._parts.signals.wait(decision.wait_s)) is not None:
                self._raise_told(number)
            return None
        return self._give_up(group, fault, decision)

    def _hangs(self, group: WorkerGroup) -> bool:
        """Whether the cycle that failed, while its other ranks still run, failed by a hang as far as is known now."""
        if self._asked is not None:
            return False
        fault = fault_in(gather(group.workers, self._ranks, self._monitors), NodeEvidence())
        aborted = fault is not None and fault.exit_code == -signal.SIGABRT  # by NCCL's watchdog, perhaps
        return fault is None or fault.kind is FaultKind.HANG or fault.fault_class is FaultClass.HANG or aborted

    def _forgive_learned_limit(self, limit: str) -> None:
        """After a kill by a learned limit, twice that limit applies in the next cycle, on every rank of the node."""
        self._multipliers = {limit: 2 * self._multipliers.get(limit, 1)} if limit else {}
        if limit:
            self._parts.recorder.limit_doubled(limit, self._multipliers[limit])

    @property
    def _is_agreed(self) -> bool:
        """Whether a rank exited as all ranks do after the same step: the others are about to."""
        return any(end.exit_code in AGREED for end in self._ranks.exits.values())

    def _let_end(self) -> None:
        """Lets ranks that have agreed to exit save and end; what does not is stopped as ever.

        Raises:
            SignalException: the launcher was told to end meanwhile.
        """
        grace.wait(self._ranks, self._parts.settings.stop.workers_stop_timeout, self._parts.signals, self._heed)
        if self._told is not None:
            self._end_as_told()

    def _give_up(self, group: WorkerGroup, fault: Fault | None, decision: Decision) -> RunResult:
        """The result of a job that is given up; without a `fault`, no rank of this node failed by itself."""
        self.exit_code, self.reason = decision.exit_code, decision.reason
        return self._stopped() if fault is None else self._failures(group, fault)

    def _as_asked(self, group: WorkerGroup, rank: int, request: ControlRequest) -> RunResult | None:
        """Does what a rank asked for, once the ranks have ended; a result when this launcher ends."""
        policy, now = self._parts.settings.restart, time.monotonic()
        decision = after_request(request, rank, self._history, policy, group.spec.max_restarts, now)
        self._parts.recorder.asked(self._cycle, request, decision)
        if decision.action is Action.RESTART:
            return None
        self.exit_code, self.reason = decision.exit_code, decision.reason
        return self._stopped()
