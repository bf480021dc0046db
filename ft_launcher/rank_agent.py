"""The ranks of a node's cycles: torch's agent taught to start them by a context of ours, to stop whole process trees,
and to say what failed. It acts, and decides nothing of what follows.

Uses torch's underscored hooks `_start_workers`, `_stop_workers`, `_shutdown`, and the name `start_processes` of torch's
module, rebound while torch starts ranks.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torch.distributed.elastic.agent.server import local_elastic_agent as torch_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as multiprocessing

from ft_launcher import grace, node_evidence, progress, script
from ft_launcher.aside import ToldMeanwhile, run_aside
from ft_launcher.attribution import Fault, FaultKind
from ft_launcher.background import Background, command_of
from ft_launcher.contained import contained
from ft_launcher.cycle import Condemned, Cycle, Phase
from ft_launcher.cycle_files import application_log, info_environment
from ft_launcher.cycle_store import CycleStore
from ft_launcher.devices import Move
from ft_launcher.doubt import about_doubt
from ft_launcher.evidence import fault_in, gather
from ft_launcher.function_context import FunctionContext
from ft_launcher.hang_warnings import HangWarnings
from ft_launcher.in_process import InProcess
from ft_launcher.monitors import STALL, NodeMonitors
from ft_launcher.node_parts import NodeParts
from ft_launcher.process_tree import Ending, ProcessTree, is_stopped
from ft_launcher.rank_context import RankContext
from ft_launcher.restart_history import CycleLife, History
from ft_launcher.restart_policy import is_known
from ft_launcher.signals import rank_signal
from ft_launcher.worker_env import cycle_environment, rank_environment, start_environment
from ft_launcher.zombies import Zombies
from rank_monitor.contract import env
from rank_monitor.contract.exit_codes import INTERRUPTED, ExitCode, died_of
from rank_monitor.contract.launcher_messages import Fenced, Verdict
from rank_monitor.contract.messages import ControlRequest, GroupMade, Restarter

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
NO_FILE = "<N/A>"
"""What torch has in the place of an error file that does not exist."""


def _no_failure_line(record: logging.LogRecord) -> bool:
    """Leaves out torch's line about the first failed process: the block and the summary say it, with the cause."""
    return not str(record.msg).startswith("failed (exitcode")


class RankAgent(LocalElasticAgent):  # type: ignore[misc]
    """Starts, hears and stops the ranks of this node.

    `exit_code`: what the launcher ends with; None: as torch does. `hidden_ranks` failed, and their stderr is not on the
    console.
    """

    def __init__(self, *args: Any, parts: NodeParts, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts = parts
        self._exit_barrier_timeout = parts.settings.stop.exit_barrier_timeout
        self._monitors = NodeMonitors(parts.runtime, parts.settings.monitor, self._nprocs, self._lease())
        self._history = History()
        self._asked: tuple[int, ControlRequest] | None = None
        self._multipliers: dict[str, float] = {}
        self._move = Move()
        self._store_of_cycle: CycleStore | None = None
        self._in_process: InProcess | None = None
        self._zombies = Zombies()
        self._background = Background(())
        self._done_at = 0.0
        self._attempt = 0
        self._told: int | None = None
        self._warnings = HangWarnings(parts, self._monitors)
        self._oom_kills: int | None = None
        self._closed = False
        self.hidden_ranks: set[int] = set()
        self.exit_code: int | None = None
        self.reason = ""

    @property
    def _nprocs(self) -> int:
        return int(self._worker_group.spec.local_world_size)

    @property
    def _cycle(self) -> int:
        return self._store_of_cycle.cycle if self._store_of_cycle else 0

    @property
    def _ranks(self) -> RankContext:
        """The ranks of the cycle, or of the last one."""
        assert isinstance(self._pcontext, RankContext), "no rank was started yet"
        return self._pcontext

    @property
    def _rung_one(self) -> InProcess:
        assert self._in_process is not None, "no rank was started yet"
        return self._in_process

    def _lease(self) -> int | None:
        """The timer by which the monitors end the ranks; None: nobody goes on without this node."""
        return None

    def _running(self) -> dict[int, int]:
        return dict(self._ranks.pidfds) if self._pcontext else {}

    def _global(self, local_rank: int) -> int:
        return int(self._worker_group.workers[local_rank].global_rank)

    def _stopped(self) -> RunResult:
        """The result of a node that ends without failed ranks."""
        return RunResult(WorkerState.STOPPED, {worker.global_rank: None for worker in self._worker_group.workers})

    # Starting and hearing them.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._oom_kills, self._zombies = node_evidence.oom_kills(), Zombies()
        self._warnings.begin_cycle()
        with self._our_context():
            pids: dict[int, int] = super()._start_workers(worker_group)
        ranks = {local_rank: (self._global(local_rank), pid) for local_rank, pid in pids.items()}
        for local_rank, (rank, pid) in ranks.items():
            self._monitors.begin_rank(self._cycle, local_rank, rank, pid, self._ranks.started_ns)
        settings, recorder = self._parts.settings, self._parts.recorder
        recorder.cycle_started(self._cycle, worker_group, ranks)
        assert self._store_of_cycle is not None
        self._in_process = InProcess(
            settings,
            self._store_of_cycle,
            self._parts.ports if worker_group.group_rank == 0 else None,
            worker_group.workers,
            self._ranks,
            self._monitors,
            recorder,
        )
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
        settings, tag = self._parts.settings, self._parts.runtime.tag
        for local_rank, rank_env in envs.items():
            rank_env.update(start_environment(settings.start, os.environ))
            rank_env.update(info_environment(settings.record, os.environ))
            rank_env.update(cycle_environment(settings.nccl, os.environ, self._multipliers, self._move))
            socket_path, stack_file = self._monitors.socket_path(local_rank), self._monitors.stack_file(local_rank)
            rank_env[env.IN_PROCESS_LIMITS] = settings.restart.in_process_limits.to_json()
            ours = rank_environment(tag, self._cycle, socket_path, stack_file, settings.monitor.stack_signal)
            rank_env.update(ours)
            if self._store_of_cycle is not None and self._store_of_cycle.ranks_port:
                rank_env[env.CYCLE_STORE] = f"{self._store_of_cycle.host}:{self._store_of_cycle.port}"
        if self._parts.is_script:
            rest["args"] = {rank: tuple(script.through_bootstrap(words)) for rank, words in rest["args"].items()}
        kind: Any = RankContext
        if not isinstance(rest["entrypoint"], str):
            stop_s = settings.stop.workers_stop_timeout
            kind = partial(FunctionContext, start_method=start_method, stop_timeout_s=stop_s)
        prefix = settings.record.per_cycle_applog_prefix
        log = application_log(prefix, self._cycle) if prefix else None
        context: RankContext = kind(envs=envs, zygotes=self._parts.zygotes, application_log=log, **rest)
        context.start()
        return context

    def _hear(self, cycle: Cycle | None) -> None:
        """Takes what the monitors say."""
        self._parts.injected.attend(self._cycle, self._parts.recorder, self._monitors, self._parts.zygotes)
        stall: Verdict | None = None
        for local_rank, news in self._monitors.handle():
            stack_file = self._monitors.stack_file(local_rank)
            self._parts.recorder.heard(self._cycle, local_rank, self._global(local_rank), news, stack_file)
            if isinstance(news, Verdict) and news.limit == STALL and self._monitors.found(local_rank).exception is None:
                stall = stall or news  # of a rank with an exception it is the way out that takes long
            if cycle is not None and isinstance(news, Verdict) and news.condemned:
                cycle.on(Condemned(local_rank))
            if cycle is not None and isinstance(news, Fenced):
                cycle.on(Phase.FENCED)
            if isinstance(news, GroupMade):
                self._warnings.made_group(local_rank, news)
            if isinstance(news, ControlRequest):
                self._consider(cycle, local_rank, news)
            if isinstance(news, Restarter) and cycle is not None:
                self._rung_one.heard(local_rank, news)
        if stall is not None and self._warnings.stalled(self._cycle, stall, self._worker_group.workers, self._ranks):
            self._hear(cycle)  # what came meanwhile

    def _consider(self, cycle: Cycle | None, local_rank: int, request: ControlRequest) -> None:
        """A request that can be followed ends the cycle; in a cycle that has ended it says what follows."""
        if not self._may_follow(request):
            logger.warning("the request is written down and not acted on")
            return
        self._asked = self._asked or (self._global(local_rank), request)
        if cycle is not None:
            cycle.on(Phase.ASKED)

    def _may_follow(self, request: ControlRequest) -> bool:
        """With a rendezvous that is not ours the other nodes could not be told."""
        return is_known(request) and not self._parts.several_nodes

    # Stopping them.

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        """torch's hook: the end of a cycle, whatever it was. Keeps the configured limit on every path."""
        self._stop_ranks(signal.SIGTERM, self._parts.settings.stop.workers_stop_timeout)

    def _tree(self, among: Callable[[int, int], bool] = lambda pid, session: True) -> ProcessTree:
        pids = self._ranks.pids() if self._pcontext else {}
        running = {pids[local_rank] for local_rank in self._running()}
        checks = self._parts.health.pids() | self._parts.memory.pids()
        keep = self._monitors.pids() | self._parts.zygotes.pids() | checks
        return ProcessTree(self._parts.runtime.tag, running, keep, self._parts.adopt_orphans, among)

    def _stop_ranks(self, first: int, limit_s: float, tree: ProcessTree | None = None) -> Ending:
        """Ends everything of the cycle and takes the exit codes; harmless when nothing runs."""
        ending = (tree or self._tree()).stop(first, limit_s, meanwhile=self._monitors.end_cycle)
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM)
        if self._in_process is not None:
            self._in_process.close()
        self._parts.cycle_info.end()
        self._parts.recorder.stopped(self._cycle, ending)
        return ending

    def _end_cycle(self, group: WorkerGroup, hung: bool = False) -> tuple[Fault, CycleLife] | None:
        """Stops the ranks; returns what failed first and how the cycle was; None when nothing failed by itself.

        Args:
            hung: the ranks are stopped since some of them hang, or hold up others: their stacks are kept.
        """
        stop_began = time.monotonic()
        tree = self._tree()
        self._monitors.snapshots(meanwhile=tree.find, stacks=hung)
        stopped = {rank for rank, pid in self._ranks.pids().items() if is_stopped(pid)}
        ending = self._stop_ranks(signal.SIGTERM, self._parts.settings.stop.workers_stop_timeout, tree)
        self._hear(None)
        evidence = gather(group.workers, self._ranks, self._monitors, stopped, ending.killed)
        if hung:
            self._parts.recorder.stacks_of_hang(self._cycle, evidence, self._monitors.stack_file)
        evidence = self._rung_one.of_the_end(evidence)
        alone = group.group_world_size == 1
        fault = fault_in(evidence, node_evidence.since(self._oom_kills), stop_began, all_ranks=alone)
        fault = fault or self._rung_one.fault(evidence) or self._zombies.fault(evidence)
        if fault is None:
            if hung:
                self._parts.recorder.hang_elsewhere(self._cycle, evidence)
            return None
        with contained("whether the fault was on purpose, or a result in doubt, cannot be found"):
            fault = self._parts.injected.explain(about_doubt(fault, evidence, self._monitors.doubts()), self._cycle)
        reached = None
        with contained("how far the cycle came cannot be found"):
            reached = progress.of_cycle(evidence, self._parts.settings.restart.checkpoint_iteration_file)
        return fault, CycleLife(stop_began - self._ranks.started_ns / 1e9, reached)

    def _take_results(self, group: WorkerGroup) -> RunResult:
        """What the ranks returned in a cycle that succeeded; a rank that was not let in again is stopped.

        Their background processes go on: `_linger` waits for them, or `_stop_workers` ends them.
        """
        lost = self._rung_one.finish()
        self._background = Background({*self._ranks.pids().values()}, self._ranks.succeeded_since(lost))
        if self._running():
            self._stop_finished()
        self._ranks.excuse(lost)
        result = self._monitor_workers(group)
        self._stop_finished()
        self._done_at = time.monotonic()
        return result

    def _stop_finished(self) -> None:
        """Ends what ranks that succeeded left running, but for their background processes."""
        stop, background = self._parts.settings.stop, self._background
        lingers = stop.linger is None or stop.linger > 0
        tree = self._tree(lambda pid, session: not (lingers and background.has(pid, session)))
        self._stop_ranks(signal.SIGTERM, stop.workers_stop_timeout, tree)

    def _linger(self) -> None:
        """Waits for the background processes of ranks that succeeded; what is left ends with the launcher.

        A signal to the launcher ends the wait; the training is complete, so this is not a failure.
        """
        limit_s = self._parts.settings.stop.linger
        deadline = math.inf if limit_s is None else self._done_at + limit_s
        tree = self._tree(self._background.has)
        if limit_s == 0:
            return
        left = tree.find()
        if not left:
            return
        self._parts.recorder.lingers(self._cycle, {pid: command_of(pid) for pid in left}, limit_s)
        while self._told is None and left and time.monotonic() < deadline:
            left = tree.wait(deadline, self._parts.signals.fileno())
            self._told = next(iter(self._parts.signals.read()), None)
        if left:
            commands = {pid: command_of(pid) for pid in left}
            self._parts.recorder.ends_background(self._cycle, commands, self._told)
            self._stop_ranks(signal.SIGTERM, self._parts.settings.stop.workers_stop_timeout, tree)

    def _failures(self, group: WorkerGroup, fault: Fault) -> RunResult:
        """torch's result of a job that failed: the ranks that failed by themselves, the root cause first."""
        local_ranks = {int(worker.global_rank): int(worker.local_rank) for worker in group.workers}
        failed = {fault.local_rank, *(local_ranks[rank] for rank in fault.failed if rank in local_ranks)}
        self._ranks.name_failed(fault.local_rank, failed)
        torchs = logging.getLogger(multiprocessing.__name__)
        torchs.addFilter(_no_failure_line)
        try:
            result = self._monitor_workers(group)
        finally:
            torchs.removeFilter(_no_failure_line)
        for rank, failure in result.failures.items():
            failure.error_file = self._keep_error_file(failure)
            if failure.exitcode == -signal.SIGTERM and isinstance(failure.message, dict):
                failure.exitcode = 1  # it was on its way out with an exception when the others were stopped
            if self._ranks.hides_errors(failure.local_rank):
                self.hidden_ranks.add(rank)
        first = result.failures.get(fault.rank)
        if first is not None and fault.kind is FaultKind.HANG and isinstance(first.message, str):
            first.message = f"{fault.what}; the launcher ended it"
        return result if result.failures else self._stopped()

    def _keep_error_file(self, failure: Any) -> str:
        """Where a rank's error file is after this launcher's end: the runtime folder is removed then."""
        if not Path(failure.error_file).is_relative_to(self._parts.runtime.folder):
            return str(failure.error_file)
        kept = self._parts.recorder.keep(self._cycle, failure.local_rank, Path(failure.error_file), "error.json")
        return kept or NO_FILE

    def _end_as_told(self) -> NoReturn:
        """A signal ends the launcher: the ranks get theirs, and time to save.

        Raises:
            SignalException: always; torch then leaves the rendezvous open for others.
        """
        assert self._told is not None
        self._parts.recorder.told(self._told)
        if self._told == signal.SIGINT:
            self._stop_ranks(signal.SIGINT, self._parts.settings.stop.workers_stop_timeout)
            self._raise_told(self._told)
        self.exit_code = self._preempt(self._told)
        raise SignalException(f"told to end by signal {self._told}", signal.Signals(self._told))

    def _preempt(self, number: int) -> int:
        """Sends the ranks the signal for `number` once and waits while they save; no limit is judged meanwhile.

        Returns:
            The launcher's exit code.
        """
        stop = self._parts.settings.stop
        self._monitors.end_cycle()
        grace.tell(self._ranks, rank_signal(number, self._parts.named_signals, stop.preemption_signal))
        by_themselves = grace.wait(self._ranks, stop.preemption_grace, self._parts.signals, self._heed)
        self._stop_ranks(signal.SIGTERM, stop.workers_stop_timeout if by_themselves else 0.0)
        return int(ExitCode.PREEMPTED if by_themselves else ExitCode.PREEMPTED_KILLED)

    def _heed(self, number: int) -> float:
        """A signal to the launcher while ranks are to end: the second one, and any Ctrl-C, shortens their time."""
        was_told, self._told = self._told is not None, self._told or number
        return self._parts.settings.stop.workers_stop_timeout if was_told or number == signal.SIGINT else math.inf

    def _raise_told(self, number: int) -> NoReturn:
        """Leaves because of a signal while no rank runs."""
        if number == signal.SIGINT:
            self.exit_code = INTERRUPTED
        else:
            self.exit_code = died_of(number) if self._pcontext is None else int(ExitCode.PREEMPTED)
        raise SignalException(f"told to end by signal {number}", signal.Signals(number))

    def _aside(self, work: Callable[[], _T]) -> _T:
        """Runs what blocks, while signals are heeded.

        Raises:
            SignalException: the launcher was told to end.
        """
        try:
            return run_aside(work, self._parts.signals)
        except ToldMeanwhile as told:
            self._raise_told(told.number)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """torch's hook at the very end, on every path: nothing of ours is left."""
        if not self._closed:
            self._closed = True
            self._parts.zygotes.close()
            self._parts.injected.close()
            self._stop_ranks(signal.SIGTERM, self._parts.settings.stop.workers_stop_timeout)
            self._monitors.close()
            self._parts.ports.close()
            self._parts.cycle_info.close()
        super()._shutdown(*args, **kwargs)
