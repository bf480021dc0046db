"""The part of the node agent that starts, reads and stops ranks: torch's agent with our process context.

Base of `NodeAgent`. Stops whole process trees and returns what failed first; does not decide what follows.

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

from ft_launcher.agent.background import InterruptedBySignal, run_aside
from ft_launcher.agent.hang_warnings import HangWarnings
from ft_launcher.agent.parts import NodeParts
from ft_launcher.attribution import Fault, FaultKind
from ft_launcher.attribution.suspect_result import about_doubt
from ft_launcher.cycle import node_evidence, stop_wait
from ft_launcher.cycle.cycle import Condemned, Cycle, CyclePhase
from ft_launcher.cycle.evidence import fault_in, gather
from ft_launcher.cycle.in_process import InProcess
from ft_launcher.cycle.zombies import Zombies
from ft_launcher.policy import progress
from ft_launcher.policy.restart_history import CycleLife, History
from ft_launcher.policy.restart_policy import is_known
from ft_launcher.processes.detached import Background, command_of
from ft_launcher.processes.process_tree import Ending, ProcessTree, is_stopped
from ft_launcher.processes.signals import rank_signal
from ft_launcher.ranks.devices import Move
from ft_launcher.ranks.environment import cycle_environment, rank_environment, start_environment
from ft_launcher.ranks.function_context import FunctionContext
from ft_launcher.ranks.monitors import NodeMonitors
from ft_launcher.ranks.rank_context import RankContext
from ft_launcher.record.contained import contained
from ft_launcher.record.cycle_files import application_log, info_environment
from ft_launcher.record.monitor_events import STALL
from ft_launcher.rendezvous.cycle_store import CycleStore
from ft_launcher.settings import script
from rank_monitor.contract import env
from rank_monitor.contract.exit_codes import INTERRUPTED, ExitCode, died_of
from rank_monitor.contract.wire.launcher_messages import Fenced, Verdict
from rank_monitor.contract.wire.messages import ControlRequest, GroupMade, Restarter

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
NO_FILE = "<N/A>"
"""What torch has in the place of an error file that does not exist."""


def _no_failure_line(record: logging.LogRecord) -> bool:
    """Filters out torch's log line about the first failed process: our block and summary show it, with the cause."""
    # The beginning of the format string in `_poll` of torch's process contexts.
    return not str(record.msg).startswith("failed (exitcode")


class RankAgent(LocalElasticAgent):  # type: ignore[misc]
    """Starts the ranks of this node, takes their monitors' messages, and stops them.

    `exit_code`: the launcher's exit code; None: as torch chooses. `reason` explains it. `hidden_ranks`: global ranks
    that failed and whose stderr is not on the console.
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
        if self._store_of_cycle:
            return self._store_of_cycle.cycle
        return 0

    @property
    def _ranks(self) -> RankContext:
        """The ranks of the present cycle; between cycles those of the last one."""
        assert isinstance(self._pcontext, RankContext), "no rank was started yet"
        return self._pcontext

    @property
    def _rung_one(self) -> InProcess:
        assert self._in_process is not None, "no rank was started yet"
        return self._in_process

    def _lease(self) -> int | None:
        """Descriptor of the timer at which the monitors end the ranks; None: no other node goes on without this one."""
        return None

    def _running(self) -> dict[int, int]:
        if self._pcontext:
            return dict(self._ranks.pidfds)
        return {}

    def _global(self, local_rank: int) -> int:
        return int(self._worker_group.workers[local_rank].global_rank)

    def _stopped(self) -> RunResult:
        """Returns the result of a node that ends without failed ranks."""
        return RunResult(WorkerState.STOPPED, {worker.global_rank: None for worker in self._worker_group.workers})

    # Starting and hearing them.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Read before the start: a rank may be killed for memory in its first second.
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
        # torch has no hook for the context: `LocalElasticAgent` calls this name of its module.
        torch_agent.start_processes = self._start_processes
        try:
            yield
        finally:
            torch_agent.start_processes = before

    def _start_processes(self, *, envs: dict[int, dict[str, str]], start_method: str = "", **rest: Any) -> RankContext:
        """Replaces torch's function of that name: completes the environments and starts the ranks in our context."""
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
                # Rank 0 hosts the ranks' store then; in-process restart needs one that outlives every rank.
                rank_env[env.CYCLE_STORE] = f"{self._store_of_cycle.host}:{self._store_of_cycle.port}"
        if self._parts.is_script:
            rest["args"] = {rank: tuple(script.through_bootstrap(words)) for rank, words in rest["args"].items()}
        kind: Any = RankContext
        if not isinstance(rest["entrypoint"], str):
            stop_s = settings.stop.workers_stop_timeout
            # The end of a rank whose function returned is bounded by the same limit as every other stop.
            kind = partial(FunctionContext, start_method=start_method, stop_timeout_s=stop_s)
        prefix = settings.record.per_cycle_applog_prefix
        if prefix:
            log = application_log(prefix, self._cycle)
        else:
            log = None
        context: RankContext = kind(envs=envs, zygotes=self._parts.zygotes, application_log=log, **rest)
        context.start()
        return context

    def _hear(self, cycle: Cycle | None) -> None:
        """Takes all messages of the monitors; passes to `cycle` what concerns it. None: it has ended already."""
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
                cycle.on(CyclePhase.FENCED)
            if isinstance(news, GroupMade):
                self._warnings.made_group(local_rank, news)
            if isinstance(news, ControlRequest):
                self._consider(cycle, local_rank, news)
            if isinstance(news, Restarter) and cycle is not None:
                self._rung_one.heard(local_rank, news)
        if stall is not None and self._warnings.stalled(self._cycle, stall, self._worker_group.workers, self._ranks):
            self._hear(cycle)  # what came meanwhile

    def _consider(self, cycle: Cycle | None, local_rank: int, request: ControlRequest) -> None:
        """Notes a rank's request if it can be followed, and ends the cycle for it; later requests are ignored."""
        if not self._may_follow(request):
            logger.warning("the request is written down and not acted on")
            return
        self._asked = self._asked or (self._global(local_rank), request)
        if cycle is not None:
            cycle.on(CyclePhase.ASKED)

    def _may_follow(self, request: ControlRequest) -> bool:
        """Whether a request can be followed: not with torch's own rendezvous, which cannot pass it to other nodes."""
        return is_known(request) and not self._parts.several_nodes

    # Stopping them.

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        """torch's hook: stops the ranks within `--workers-stop-timeout`, whatever limit torch passes."""
        self._stop_ranks(signal.SIGTERM, self._parts.settings.stop.workers_stop_timeout)

    def _tree(self, among: Callable[[int, int], bool] = lambda pid, session: True) -> ProcessTree:
        if self._pcontext:
            pids = self._ranks.pids()
        else:
            pids = {}
        running = {pids[local_rank] for local_rank in self._running()}
        checks = self._parts.health.pids() | self._parts.memory.pids()
        # These are children of this process too, and would count as the cycle's.
        keep = self._monitors.pids() | self._parts.zygotes.pids() | checks
        return ProcessTree(self._parts.runtime.tag, running, keep, self._parts.adopt_orphans, among)

    def _stop_ranks(self, first: int, limit_s: float, tree: ProcessTree | None = None) -> Ending:
        """Ends all processes of the cycle and takes the exit codes; does nothing when none runs.

        Args:
            first: the signal that all get at once; SIGKILL follows after `limit_s` seconds.
        """
        ending = (tree or self._tree()).stop(first, limit_s, meanwhile=self._monitors.end_cycle)
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM)
        if self._in_process is not None:
            self._in_process.close()
        self._parts.cycle_info.end()
        self._parts.recorder.stopped(self._cycle, ending)
        return ending

    def _end_cycle(self, group: WorkerGroup, hung: bool = False) -> tuple[Fault, CycleLife] | None:
        """Stops the ranks; returns what failed first and how long the cycle lived. None when no rank failed by itself.

        Args:
            hung: some ranks hang or hold up others, so the stacks of all are kept.
        """
        stop_began = time.monotonic()
        tree = self._tree()
        # The processes are looked for while the monitors answer: both take time in a large job.
        self._monitors.snapshots(meanwhile=tree.find, stacks=hung)
        # Read before the stop continues them: others waited for a rank that was under SIGSTOP or a debugger.
        stopped = {rank for rank, pid in self._ranks.pids().items() if is_stopped(pid)}
        ending = self._stop_ranks(signal.SIGTERM, self._parts.settings.stop.workers_stop_timeout, tree)
        self._hear(None)
        evidence = gather(group.workers, self._ranks, self._monitors, stopped, ending.killed)
        if hung:
            self._parts.recorder.stacks_of_hang(self._cycle, evidence, self._monitors.stack_file)
        evidence = self._rung_one.of_the_end(evidence)
        # With several nodes the rank that all of these wait for may be on another node.
        alone = group.group_world_size == 1
        fault = fault_in(evidence, node_evidence.since(self._oom_kills), stop_began, all_ranks=alone)
        # Rung 1 and zombies count only where no rank failed by itself: their ranks have no failure of their own.
        fault = fault or self._rung_one.fault(evidence) or self._zombies.fault(evidence)
        if fault is None:
            if hung:
                self._parts.recorder.hang_elsewhere(self._cycle, evidence)
            return None
        # Texts of ranks are read here: an error in them must not stop the restart.
        with contained("whether the fault was on purpose, or a result in doubt, cannot be found"):
            fault = self._parts.injected.explain(about_doubt(fault, evidence, self._monitors.doubts()), self._cycle)
        reached = None
        with contained("how far the cycle came cannot be found"):
            reached = progress.of_cycle(evidence, self._parts.settings.restart.checkpoint_iteration_file)
        return fault, CycleLife(stop_began - self._ranks.started_ns / 1e9, reached)

    def _take_results(self, group: WorkerGroup) -> RunResult:
        """Returns the ranks' results after a cycle that succeeded. Stops ranks that were started again and not let in.

        Background processes of the ranks go on: `_linger` waits for them, or `_stop_workers` ends them.
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
        """Ends what ranks that succeeded left running, except their background processes where these may linger."""
        stop, background = self._parts.settings.stop, self._background
        # `--ft-linger=0` ends them at once, None never.
        lingers = stop.linger is None or stop.linger > 0
        tree = self._tree(lambda pid, session: not (lingers and background.has(pid, session)))
        self._stop_ranks(signal.SIGTERM, stop.workers_stop_timeout, tree)

    def _linger(self) -> None:
        """Waits up to `--ft-linger` for background processes of ranks that succeeded, then ends those that are left.

        A signal to the launcher ends the wait. The training is complete, so this is not a failure.
        """
        limit_s = self._parts.settings.stop.linger
        if limit_s is None:
            deadline = math.inf
        else:
            deadline = self._done_at + limit_s
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
        """Returns torch's result of a job that failed: the ranks that failed by themselves, the root cause first."""
        local_ranks = {int(worker.global_rank): int(worker.local_rank) for worker in group.workers}
        failed = {fault.local_rank, *(local_ranks[rank] for rank in fault.failed if rank in local_ranks)}
        self._ranks.name_failed(fault.local_rank, failed)
        # torch logs while it collects the failures, and offers no switch for it.
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
            # torch says only that a signal ended it, which is what the launcher did and not what went wrong.
            first.message = f"{fault.what}; the launcher ended it"
        if result.failures:
            return result
        return self._stopped()

    def _keep_error_file(self, failure: Any) -> str:
        """Copies an error file out of the runtime folder, which is removed at the end; returns where it is then."""
        if not Path(failure.error_file).is_relative_to(self._parts.runtime.folder):
            return str(failure.error_file)
        kept = self._parts.recorder.keep(self._cycle, failure.local_rank, Path(failure.error_file), "error.json")
        return kept or NO_FILE

    def _end_as_told(self) -> NoReturn:
        """Ends the ranks after a signal to the launcher: they get theirs, and time to save.

        Raises:
            SignalException: always; torch then leaves the rendezvous open for others.
        """
        assert self._told is not None
        self._parts.recorder.told(self._told)
        if self._told == signal.SIGINT:
            # Ctrl-C reaches the ranks as SIGINT, as it would from the terminal: they are in sessions of their own.
            self._stop_ranks(signal.SIGINT, self._parts.settings.stop.workers_stop_timeout)
            self._raise_told(self._told)
        self.exit_code = self._preempt(self._told)
        raise SignalException(f"told to end by signal {self._told}", signal.Signals(self._told))

    def _preempt(self, number: int) -> int:
        """Sends the ranks the signal that stands for `number` once, and waits while they save. No limit is judged.

        Returns:
            The launcher's exit code.
        """
        stop = self._parts.settings.stop
        self._monitors.end_cycle()
        # To main processes only: data loaders must not end while their rank saves.
        stop_wait.tell(self._ranks, rank_signal(number, self._parts.named_signals, stop.preemption_signal))
        # `stop_wait` reads the launcher's signals, so a second one is noticed during the grace.
        by_themselves = stop_wait.wait(self._ranks, stop.preemption_grace, self._parts.signals, self._heed)
        self._stop_ranks(signal.SIGTERM, stop.workers_stop_timeout if by_themselves else 0.0)
        return int(ExitCode.PREEMPTED if by_themselves else ExitCode.PREEMPTED_KILLED)

    def _heed(self, number: int) -> float:
        """Returns how long ranks may still take to end after a signal to the launcher (seconds).

        The second signal, and any Ctrl-C, shortens their time to `--workers-stop-timeout`.
        """
        was_told, self._told = self._told is not None, self._told or number
        if was_told or number == signal.SIGINT:
            return self._parts.settings.stop.workers_stop_timeout
        return math.inf

    def _raise_told(self, number: int) -> NoReturn:
        """Sets the exit code for a signal while no rank runs, and raises `SignalException`."""
        if number == signal.SIGINT:
            self.exit_code = INTERRUPTED
        elif self._pcontext is None:
            self.exit_code = died_of(number)
        else:
            self.exit_code = int(ExitCode.PREEMPTED)
        raise SignalException(f"told to end by signal {number}", signal.Signals(number))

    def _aside(self, work: Callable[[], _T]) -> _T:
        """Runs a blocking call in a thread; returns its result.

        Raises:
            SignalException: the launcher got a signal before the call returned.
        """
        try:
            return run_aside(work, self._parts.signals)
        except InterruptedBySignal as told:
            self._raise_told(told.number)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """torch's hook at the very end, on every path: closes all that this agent started or holds."""
        if not self._closed:
            self._closed = True
            self._parts.zygotes.close()
            self._parts.injected.close()
            self._stop_ranks(signal.SIGTERM, self._parts.settings.stop.workers_stop_timeout)
            self._monitors.close()
            self._parts.ports.close()
            self._parts.cycle_info.close()
        super()._shutdown(*args, **kwargs)
