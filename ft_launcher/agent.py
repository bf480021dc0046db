"""The node agent: torch elastic's local agent with a cycle loop of our own that waits for events.

It acts: `cycle.py` says when a cycle has ended, `attribution.py` why, `restart_policy.py` what follows. Uses torch's
underscored hooks `_invoke_run`, `_rendezvous`, `_start_workers`, `_stop_workers`, `_shutdown`, `_exit_barrier`, and the
name `start_processes` of torch's module, rebound while torch starts ranks.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from torch.distributed.elastic.agent.server import local_elastic_agent as torch_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from ft_launcher import cycle_store, node_evidence
from ft_launcher.aside import ToldMeanwhile, run_aside
from ft_launcher.attribution import attribute
from ft_launcher.cycle import Condemned, Cycle, MembersWait, Phase, RankEnded, ToldToEnd
from ft_launcher.cycle_store import CycleStore, PortHolder
from ft_launcher.evidence import gather
from ft_launcher.monitors import NodeMonitors
from ft_launcher.process_tree import Ending, ProcessTree, catches, is_stopped
from ft_launcher.rank_context import RankContext
from ft_launcher.recorder import Recorder
from ft_launcher.restart_policy import Action, History, decide
from ft_launcher.runtime import Runtime
from ft_launcher.signals import SignalPipe
from ft_launcher.wait import readable
from ft_launcher.worker_env import rank_environment
from ft_launcher.zygote_pool import ZygotePool
from rank_monitor.contract.config import Settings
from rank_monitor.contract.exit_codes import INTERRUPTED, ExitCode, died_of
from rank_monitor.contract.messages import Verdict

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass
class NodeParts:
    """What the agent works with, made by `launch.py`."""

    settings: Settings
    runtime: Runtime
    recorder: Recorder
    signals: SignalPipe
    ports: PortHolder
    zygotes: ZygotePool
    several_nodes: bool
    adopt_orphans: bool = True


class NodeAgent(LocalElasticAgent):  # type: ignore[misc]
    """The agent of this node. `exit_code` is what the launcher should end with; None: as torch would."""

    def __init__(self, *args: Any, parts: NodeParts, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts = parts
        self._exit_barrier_timeout = parts.settings.stop.exit_barrier_timeout
        self._monitors = NodeMonitors(parts.runtime, parts.settings.monitor, self._nprocs)
        self._history = History()
        self._multipliers: dict[str, float] = {}
        self._store_of_cycle: CycleStore | None = None
        self._attempt = 0
        self._told: int | None = None
        self._oom_kills: int | None = None
        self._closed = False
        self.exit_code: int | None = None

    @property
    def _nprocs(self) -> int:
        return int(self._worker_group.spec.local_world_size)

    @property
    def _cycle(self) -> int:
        return self._store_of_cycle.cycle if self._store_of_cycle else 0

    @property
    def _ranks(self) -> RankContext | None:
        return self._pcontext if isinstance(self._pcontext, RankContext) else None

    # The cycle loop.

    def _invoke_run(self, role: str = "") -> RunResult:
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            match self._watch_cycle():
                case Phase.SUCCEEDED:
                    return self._succeed(group)
                case Phase.FAILED:
                    if (result := self._after_failure(group)) is not None:
                        return result
                    self._initialize_workers(group)
                case Phase.REFORM:
                    self._parts.recorder.reform(self._cycle)
                    self._restart_workers(group)
                case _:
                    self._end_as_told()

    def _watch_cycle(self) -> Phase:
        """Waits for events until the cycle has ended."""
        cycle = Cycle(self._nprocs)
        while cycle.phase is Phase.RUNNING:
            ready = readable(self._descriptors(), self._wait_limit())
            for number in self._parts.signals.read():
                self._told = self._told or number
                cycle.on(ToldToEnd(number))
            self._parts.zygotes.handle()
            ended = [rank for rank, pidfd in self._running().items() if pidfd in ready]
            self._hear(cycle)
            for local_rank in ended:
                assert self._ranks is not None
                if (end := self._ranks.reap(local_rank)) is not None:
                    self._parts.recorder.rank_ended(self._cycle, self._global(local_rank), end.exit_code)
                    cycle.on(RankEnded(local_rank, end.exit_code))
            if self._parts.several_nodes and not ready:
                cycle.on(MembersWait(self._waiting_nodes()))
        return cycle.phase

    def _descriptors(self) -> set[int]:
        ours = self._monitors.descriptors() | self._parts.zygotes.descriptors()
        return {self._parts.signals.fileno(), *self._running().values(), *ours}

    def _running(self) -> dict[int, int]:
        return dict(self._ranks.pidfds) if self._ranks else {}

    def _wait_limit(self) -> float | None:
        """How long to wait for an event; with several nodes, torch's membership is asked each monitor interval."""
        checks = []
        if (check := self._monitors.next_check()) is not None:
            checks.append(check - time.monotonic())
        if self._parts.several_nodes:
            checks.append(float(self._worker_group.spec.monitor_interval))
        return max(0.0, min(checks)) if checks else None

    def _waiting_nodes(self) -> int:
        try:
            return int(self._rdzv_handler.num_nodes_waiting())
        except Exception as error:  # the training is healthy: a store that does not answer ends nothing
            self._parts.recorder.store_silent(error)
            return 0

    def _hear(self, cycle: Cycle | None) -> None:
        """Takes what the monitors say."""
        for local_rank, news in self._monitors.handle():
            stack_file = self._monitors.stack_file(local_rank)
            self._parts.recorder.heard(self._cycle, local_rank, self._global(local_rank), news, stack_file)
            if cycle is not None and isinstance(news, Verdict) and news.condemned:
                cycle.on(Condemned(local_rank))

    def _global(self, local_rank: int) -> int:
        return int(self._worker_group.workers[local_rank].global_rank)

    # Forming and starting a cycle.

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        form = super()._rendezvous
        self._aside(lambda: form(worker_group))
        self._store_of_cycle = self._aside(lambda: self._open_store(worker_group))
        worker_group.master_addr = self._store_of_cycle.host
        worker_group.master_port = self._store_of_cycle.port
        self._remaining_restarts = worker_group.spec.max_restarts - self._store_of_cycle.cycle

    def _open_store(self, group: WorkerGroup) -> CycleStore:
        static = self._rdzv_handler.get_backend() == "static" and group.group_world_size > 1
        attempt, self._attempt = self._attempt, self._attempt + 1
        if static and attempt == 0:
            return cycle_store.given(group.store, group.group_rank == 0, group.master_addr, group.master_port)
        suffix = f"/{attempt}" if static else ""
        if group.group_rank == 0:
            return cycle_store.publish(group.store, self._parts.ports, group.master_addr, suffix)
        return cycle_store.learn(group.store, suffix)

    def _aside(self, work: Callable[[], _T]) -> _T:
        """Runs what blocks, while signals are heeded.

        Raises:
            SignalException: the launcher was told to end.
        """
        try:
            return run_aside(work, self._parts.signals)
        except ToldMeanwhile as told:
            self._raise_told(told.number)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._oom_kills = node_evidence.oom_kills()
        with self._our_context():
            pids: dict[int, int] = super()._start_workers(worker_group)
        assert self._ranks is not None
        ranks = {local_rank: (self._global(local_rank), pid) for local_rank, pid in pids.items()}
        self._monitors.begin_cycle(self._cycle, ranks, self._ranks.started_ns)
        self._parts.recorder.cycle_started(self._cycle, worker_group, ranks)
        return pids

    @contextmanager
    def _our_context(self) -> Iterator[None]:
        before = torch_agent.start_processes
        torch_agent.start_processes = self._start_processes
        try:
            yield
        finally:
            torch_agent.start_processes = before

    def _start_processes(self, *, envs: dict[int, dict[str, str]], start_method: str = "", **rest: Any) -> RankContext:
        """Stands in for torch's function of that name."""
        for local_rank, rank_env in envs.items():
            rank_env.update(
                rank_environment(
                    self._parts.runtime.tag,
                    self._cycle,
                    self._monitors.socket_path(local_rank),
                    self._monitors.stack_file(local_rank),
                    self._parts.settings.monitor.stack_signal,
                    self._multipliers,
                )
            )
        context = RankContext(envs=envs, zygotes=self._parts.zygotes, **rest)
        context.start()
        return context

    # Ending a cycle.

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        """torch's hook: the end of a cycle, whatever it was. Keeps the configured limit on every path."""
        self._stop_ranks(signal.SIGTERM, self._parts.settings.stop.workers_stop_timeout)

    def _tree(self) -> ProcessTree:
        pids = self._ranks.pids() if self._ranks else {}
        running = {pids[local_rank] for local_rank in self._running()}
        keep = self._monitors.pids() | self._parts.zygotes.pids()
        return ProcessTree(self._parts.runtime.tag, running, keep, self._parts.adopt_orphans)

    def _stop_ranks(self, first: int, limit_s: float) -> Ending:
        """Ends everything of the cycle and takes the exit codes; harmless when nothing runs."""
        self._monitors.end_cycle()
        ending = self._tree().stop(first, limit_s)
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM)
        self._parts.recorder.stopped(self._cycle, ending)
        return ending

    def _succeed(self, group: WorkerGroup) -> RunResult:
        result = self._monitor_workers(group)
        self._stop_workers(group)
        self._parts.recorder.cycle_ended(self._cycle, "succeeded")
        if group.group_world_size > 1:
            try:
                self._aside(super()._exit_barrier)
            except SignalException as told:
                logger.warning("%s; the training is complete, so this is no failure", told)
        self.exit_code = int(ExitCode.OK)
        return result

    def _after_failure(self, group: WorkerGroup) -> RunResult | None:
        """Stops the others, finds out what happened and decides; a result when the job ends here."""
        stop_began = time.monotonic()
        assert self._ranks is not None
        self._monitors.snapshots()
        stopped = {rank for rank, pid in self._ranks.pids().items() if is_stopped(pid)}
        ending = self._stop_ranks(signal.SIGTERM, self._parts.settings.stop.workers_stop_timeout)
        self._hear(None)
        evidence = gather(group.workers, self._ranks, self._monitors, stopped, ending.killed)
        recorder, settings = self._parts.recorder, self._parts.settings
        fault = attribute(evidence, node_evidence.since(self._oom_kills), stop_began)
        assert fault is not None, "a cycle failed without a failed rank"
        now = time.monotonic()
        decision = decide(fault, self._history, settings.restart, group.spec.max_restarts, now)
        self._history = self._history.after(decision, now)
        recorder.failed(self._cycle, fault, decision)
        if decision.action is Action.RESTART:
            self._forgive_learned_limit(fault.limit if fault.learned_limit else "")
            return None
        self.exit_code = decision.exit_code
        result = self._monitor_workers(group)
        first = result.failures.get(fault.rank)
        if first is not None:  # torch names the earliest failure the root cause
            first.timestamp = min(failure.timestamp for failure in result.failures.values()) - 1
        return result

    def _forgive_learned_limit(self, limit: str) -> None:
        """After a kill by a learned limit, twice that limit applies in the next cycle, on every rank of the node."""
        self._multipliers = {limit: 2 * self._multipliers.get(limit, 1)} if limit else {}
        if limit:
            self._parts.recorder.limit_doubled(limit, self._multipliers[limit])

    def _end_as_told(self) -> NoReturn:
        """A signal ends the launcher: the ranks get theirs, and time to save.

        Raises:
            SignalException: always; torch then leaves the rendezvous open for others.
        """
        assert self._told is not None and self._ranks is not None
        stop = self._parts.settings.stop
        self._parts.recorder.told(self._told)
        if self._told == signal.SIGINT:
            self._stop_ranks(signal.SIGINT, stop.workers_stop_timeout)
            self._raise_told(self._told)
        self._monitors.end_cycle()
        for pidfd, pid in ((fd, self._ranks.pids()[rank]) for rank, fd in self._running().items()):
            number = stop.preemption_signal if catches(pid, stop.preemption_signal) else signal.SIGTERM
            signal.pidfd_send_signal(pidfd, number)
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        deadline = time.monotonic() + stop.preemption_grace
        while self._running() and (left := deadline - time.monotonic()) > 0:
            readable([*self._running().values(), self._parts.signals.fileno()], left)
            if self._parts.signals.read():
                deadline = min(deadline, time.monotonic() + stop.workers_stop_timeout)
            self._ranks.reap_all()
        by_themselves = not self._running()
        self._stop_ranks(signal.SIGTERM, stop.workers_stop_timeout if by_themselves else 0.0)
        self.exit_code = int(ExitCode.PREEMPTED if by_themselves else ExitCode.PREEMPTED_KILLED)
        raise SignalException(f"told to end by signal {self._told}", signal.Signals(self._told))

    def _raise_told(self, number: int) -> NoReturn:
        """Leaves because of a signal while no rank runs."""
        if number == signal.SIGINT:
            self.exit_code = INTERRUPTED
        else:
            self.exit_code = died_of(number) if self._pcontext is None else int(ExitCode.PREEMPTED)
        raise SignalException(f"told to end by signal {number}", signal.Signals(number))

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """torch's hook at the very end, on every path: nothing of ours is left."""
        if not self._closed:
            self._closed = True
            self._parts.zygotes.close()
            self._stop_ranks(signal.SIGTERM, self._parts.settings.stop.workers_stop_timeout)
            self._monitors.close()
            self._parts.ports.close()
        super()._shutdown(*args, **kwargs)
