"""The ranks of this node: starts them, receives what their monitors report, and stops them.

Made by the node agent, once for a job. In each cycle the agent calls:

1. `prepare`, then `start`, which returns torch's context of the processes, then `begin`.
2. `poll`, as a source of events, until the cycle has ended.
3. `stop`, by the membership or by `fault_finding.py`.

The order in `poll` matters: messages of the monitors come before exit codes, since a verdict or an exception explains
the death that follows it.

All methods are called on the agent's thread, and only `stop`, `close` and the start of the ranks block for longer. What
failed first is found in `fault_finding.py`; what follows the end of a cycle is decided by the coordinator.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

from ft_launcher.agent.cycle import nccl_ras
from ft_launcher.agent.cycle.cycle import Condemned, CyclePhase, Event
from ft_launcher.agent.cycle.failed_programs import FailedPrograms, work_of
from ft_launcher.agent.cycle.nccl_ras import NcclRas
from ft_launcher.agent.cycle.zombies import Zombies
from ft_launcher.agent.event_source import EventSource
from ft_launcher.agent.hang_warnings import HangWarnings
from ft_launcher.agent.in_process.in_process import InProcess
from ft_launcher.agent.parts import NodeParts
from ft_launcher.agent.state_in_memory import StateInMemory
from ft_launcher.decide.attribution.first_failure import what_was_raised
from ft_launcher.decide.policy.case import RankRequest
from ft_launcher.decide.policy.restart_policy import is_known
from ft_launcher.job.rendezvous.cycle_store import CycleStore
from ft_launcher.node.monitors.monitors import NodeMonitors
from ft_launcher.node.monitors.rank_report import Replaced
from ft_launcher.node.processes.orphans import Orphans
from ft_launcher.node.processes.process_tree import Hurry, ProcessTree
from ft_launcher.node.ranks.environment import cycle_environment, rank_environment
from ft_launcher.node.ranks.function_context import FunctionContext
from ft_launcher.node.ranks.rank_context import RankContext
from ft_launcher.record.ending import Ending
from ft_launcher.record.journal.contained import contained
from ft_launcher.record.logs.cycle_files import application_log
from ft_launcher.record.placement import Placement
from ft_launcher.settings import rank_program
from rank_monitor.contract import env
from rank_monitor.contract.exit_codes import AGREED
from rank_monitor.contract.processes.cgroup import oom_kills
from rank_monitor.contract.settings.log_pattern import COUNTED_FROM_1
from rank_monitor.contract.wire.complaints import Complaints
from rank_monitor.contract.wire.json_record import write_record
from rank_monitor.contract.wire.launcher_messages import STALL, Fenced, Suspected, Verdict
from rank_monitor.contract.wire.messages import (
    NO_ITERATION,
    ControlRequest,
    GroupMade,
    Message,
    ModulesImported,
    ProgramFailed,
    RestartReport,
    ResultInDoubt,
    StateLoaded,
)

logger = logging.getLogger(__name__)

_FIRST_ASK_S, _ASK_S = 1.0, 10.0
"""Seconds between two questions to the monitors for their time ledgers: at the beginning of a cycle, and at most. A
monitor that is lost takes so much of the ledger with it. An answer has 3 KB and costs the monitor 0.05 ms."""

_ASKING_NODES = 3
"""How many nodes ask NCCL, beginning with the first node: each answer covers the whole job, so an answer to each of
hundreds of nodes would be much to send. More than one asks, since the first may be the node that is cut off."""


class Ranks(EventSource):
    """The ranks of this node, through all cycles of the job.

    Args:
        parts: of this launcher.
        placement: this node's part in the job before the first cycle. The agent replaces it for each cycle.
        lease: descriptor of a timer. When it runs out, the monitors end the ranks, whatever this process does. None: no
            other node goes on without this one.
        follows_requests: whether the requests of ranks (a restart, the end of the job) can be followed.

    Attributes:
        parts: of this launcher.
        placement: this node's part in the present cycle.
        monitors: the monitors of these ranks, which live as long as the job.
        nccl: asks NCCL which ranks it reaches.
        state: what is known of the training's state in memory.
    """

    def __init__(
        self,
        parts: NodeParts,
        placement: Placement,
        lease: int | None,
        follows_requests: bool,
    ) -> None:
        self.parts = parts
        self.placement = placement
        self.monitors = NodeMonitors(parts.runtime, parts.settings.monitor, len(placement.ranks), lease)
        self.nccl = NcclRas(os.environ, parts.settings.monitor.flight_recorder != "off")
        from_1 = parts.settings.record.watch_log in COUNTED_FROM_1
        self.state = StateInMemory(parts.state_in_memory, parts.recorder.memory, from_1)
        self.store: CycleStore | None = None
        """The store of the cycle. The agent sets it before the start of the ranks."""
        self.suspect_result: ResultInDoubt | None = None
        """The result because of which the ranks of the next cycle run on other nodes than before; None: no rank was
        moved."""
        self.request: RankRequest | None = None
        """The first request of this cycle that can be followed."""
        self._complaints = Complaints(logger.warning)
        self.zombies = Zombies()
        """The watch for zombies among the ranks of this cycle."""
        stop = parts.settings.stop
        self._failed_programs = FailedPrograms(idle_s=stop.workers_stop_timeout, busy_s=stop.linger, look=work_of)
        self._orphans = Orphans(adopts=parts.adopt_orphans, on_reaped=parts.shared_memory.note)
        self._sessions: set[int] = set()
        """The sessions of all processes that were ranks of the present or the last cycle."""
        self.hurry: Hurry | None = None
        """What shortens a stop. The node agent sets it to the signals that end the launcher."""
        self.oom_kills_before: int | None = None
        """What `oom_kills` returned before the start of this cycle."""
        self._follows_requests = follows_requests
        self._limit_factors: dict[str, float] = {}
        """Learned limit -> factor by which the ranks of the next cycle extend it."""
        self._warnings = HangWarnings(parts, self.monitors)
        self._processes: RankContext | None = None
        self._in_process: InProcess | None = None
        self._ask_times_at = math.inf

    @property
    def cycle(self) -> int:
        """The number of the present cycle; between two cycles that of the last one."""
        if self.store is None:
            return 0
        return self.store.cycle

    @property
    def were_started(self) -> bool:
        """Whether ranks were ever started. Until then a signal ends the launcher as it would end any program."""
        return self._processes is not None

    @property
    def processes(self) -> RankContext:
        """The processes of the present cycle; between two cycles those of the last one."""
        assert self._processes is not None, "no rank was started yet"
        return self._processes

    @property
    def in_process(self) -> InProcess:
        """In-process restart in the present cycle; between two cycles that of the last one."""
        assert self._in_process is not None, "no rank was started yet"
        return self._in_process

    @property
    def have_agreed(self) -> bool:
        """Whether a rank exited with a code by which all ranks leave together. The other ranks are about to exit
        too."""
        return any(end.exit_code in AGREED for end in self.processes.exits.values())

    def running(self) -> dict[int, int]:
        """Returns the pidfds of the running ranks, by local rank; empty before the first start."""
        if self._processes is None:
            return {}
        return dict(self._processes.pidfds)

    def global_rank(self, local_rank: int) -> int:
        """Returns the global rank of a local one."""
        return self.placement.ranks[local_rank].rank

    def global_ranks(self) -> list[int]:
        """Returns the global ranks of this node."""
        return [numbers.rank for numbers in self.placement.ranks]

    # Start.

    def start(self, *, envs: dict[int, dict[str, str]], start_method: str, **kwargs: Any) -> RankContext:
        """Completes the environments of the ranks, and starts the ranks. Called after `prepare`.

        The ranks are forks of the zygote, or executed where that cannot fork them. Blocks until all are started.

        Args:
            envs: the variables of each rank, by local rank. This method adds to them.
            start_method: multiprocessing's, for ranks that call a function.
            kwargs: the other arguments of torch's `SubprocessContext`.

        Returns:
            torch's context of the processes, as a class of this project.
        """
        settings = self.parts.settings
        is_program = isinstance(kwargs["entrypoint"], str) and not self.parts.is_script
        of_all = cycle_environment(settings, os.environ, is_program, self._limit_factors, self.suspect_result)
        of_all |= self.nccl.variables()
        of_all[env.IN_PROCESS_LIMITS] = write_record(self.parts.in_process_limits)
        of_all |= self.parts.more_environment(self.cycle, self.placement.has_rank0)
        if self.store is not None and self.store.ranks_port:
            # In this case rank 0 hosts the ranks' store. In-process restart needs a store that outlives every rank: the
            # ranks find the agent's by this variable.
            of_all[env.CYCLE_STORE] = f"{self.store.host}:{self.store.port}"
        for local_rank, rank_env in envs.items():
            of_rank = rank_environment(
                self.parts.runtime.tag,
                self.cycle,
                self.monitors.socket_path(local_rank),
                self.monitors.stack_file(local_rank),
                settings.monitor.stack_signal,
                self.monitors.recorder_socket(local_rank),
            )
            rank_env.update(of_all | of_rank)
        if self.parts.is_script:
            kwargs["args"] = {
                rank: tuple(rank_program.through_bootstrap(command)) for rank, command in kwargs["args"].items()
            }
        kind: Callable[..., RankContext] = RankContext
        if not isinstance(kwargs["entrypoint"], str):
            stop_s = settings.stop.workers_stop_timeout
            # The end of a rank whose function returned is bounded by the same limit as every other stop.
            kind = partial(FunctionContext, start_method=start_method, stop_timeout_s=stop_s)
        log = None
        if settings.record.per_cycle_applog_prefix:
            log = application_log(settings.record.per_cycle_applog_prefix, self.cycle)
        is_read = settings.record.watch_log is not None
        zygotes = self.parts.zygotes
        context = kind(envs=envs, zygotes=zygotes, application_log=log, is_read=is_read, **kwargs)
        context.start()
        return context

    def bring_state_back(self) -> None:
        """Before the job's first cycle: brings back into memory what an earlier start of the job has written to shared
        storage (`--ft-memory-flush`). Blocks while the storage gives bytes; a signal ends the wait.

        In a later cycle a node that joins, as a spare does, brings nothing back: the other nodes have gone on from that
        state, or cannot, and would wait for a copy that nobody loads.
        """
        flush = self.parts.state_in_memory.flush
        if flush is not None and self.cycle == 0 and not self.were_started:
            found = flush.bring_back(self.placement.world_size, self.global_ranks(), self.parts.signals.fileno())
            self.parts.recorder.memory.brought_back(found)

    def prepare(self) -> None:
        """Resets what is known of the last cycle. Called right before the start of the ranks."""
        # Read before the start: a rank may be killed for lack of memory in its first second.
        self.oom_kills_before = oom_kills()
        self.parts.shared_memory.cycle_begins()
        self.zombies = Zombies()
        self._warnings.begin_cycle()
        self.state.cycle_begins()
        self.nccl.begin_cycle()
        self._sessions = set()
        for local_rank in self.monitors.local_ranks:
            self._failed_programs.reset(local_rank)
        self.request = None

    def begin(self, processes: RankContext) -> None:
        """Has the monitors watch the ranks that have just started, and records the beginning of the cycle.

        Called right after `start`. Does not block.

        Args:
            processes: what `start` has returned.
        """
        assert self.store is not None
        self._processes = processes
        processes.on_reaped = self.parts.shared_memory.note
        processes.files = self.parts.recorder.files.thread
        pids = processes.pids()
        for local_rank, pid in pids.items():
            self.monitors.begin_rank(self.cycle, local_rank, self.global_rank(local_rank), pid, processes.started_ns)
        self.parts.recorder.cycle_started(self.placement, pids)
        self.parts.times.ranks_started(self.cycle, processes.started_ns)
        self._ask_times_at = time.monotonic() + _FIRST_ASK_S
        ports = None
        if self.placement.has_rank0:
            ports = self.parts.ports
        self._in_process = InProcess(
            self.parts.settings,
            self.store,
            ports,
            self.placement,
            processes,
            self.monitors,
            self.parts.recorder.in_process,
        )

    def relax_learned_limit(self, limit: str) -> None:
        """Doubles the learned limit that ended a rank, for every rank of the next cycle.

        A learned limit that ends a rank may have been too short: a restart would only meet it again. A limit that ends
        ranks of two cycles in a row is doubled again. Called by the membership after each cycle that failed.

        Args:
            limit: the name of the limit; empty: no learned limit ended a rank, and all factors are reset.
        """
        if not limit:
            self._limit_factors = {}
            return
        self._limit_factors = {limit: 2 * self._limit_factors.get(limit, 1)}
        self.parts.recorder.limit_doubled(limit, self._limit_factors[limit])

    # As a source of events.

    def descriptors(self) -> set[int]:
        """Returns descriptors of which one is readable when `poll` has something to do: those of monitors, zygote,
        injected faults and in-process restart, and a pidfd of each rank that runs."""
        found = self.monitors.descriptors() | self.parts.zygotes.descriptors() | self.parts.injected.descriptors()
        found |= self.processes.descriptors() | self.in_process.descriptors()
        # The pidfd of a rank whose exit code cannot be taken yet stays readable, and would wake the loop without end.
        return found | {pidfd for rank, pidfd in self.running().items() if rank not in self.zombies.unreaped}

    def next_check(self) -> float | None:
        """Returns when `poll` should be called even if nothing is readable (monotonic seconds); None: no need."""
        sources = (
            *(self.monitors, self.processes, self.in_process, self.zombies, self._warnings),
            self._failed_programs,
        )
        moments = [self._ask_times_at, *(source.next_check() for source in sources)]
        return min((moment for moment in moments if moment is not None), default=None)

    def poll(self, ready: Set[int]) -> list[Event]:
        """Receives the monitors' messages, then exit codes, and has in-process restart (level 1) act on both.

        In this order, since a verdict or an exception explains the death that follows it. Also does what is due by
        time: the watch for zombies, the warnings about hangs, the question for time ledgers.
        """
        self.parts.zygotes.handle()
        learned = self.parts.zygotes.pop_learned()
        if learned is not None:
            self.parts.recorder.modules_preloaded(learned.names, learned.left_out, learned.mib, learned.seconds)
        self.processes.poll()
        unreaped = self.zombies.unreaped
        # The exit code of a rank that has ended may not be there yet (`zombies.py`). Such a rank is tried again at each
        # wake-up: no descriptor reports the code.
        ended = [rank for rank, pidfd in self.running().items() if pidfd in ready or rank in unreaped]
        events = self.receive() + self._receive_before_ends([rank for rank in ended if rank not in unreaped])
        for local_rank in ended:
            end = self.processes.reap(local_rank)
            if end is None:
                unreaped.add(local_rank)
            else:
                unreaped.discard(local_rank)
                self._failed_programs.reset(local_rank)
                self.parts.recorder.rank_ended(self.cycle, self.global_rank(local_rank), end.exit_code)
                events.append(self.in_process.ended(local_rank, end.exit_code))
        self._end_failed_programs()
        events += self.in_process.poll()
        is_due = time.monotonic() >= self.zombies.next_check()  # asked before `poll`, which moves it on
        if self.zombies.poll(self.processes):
            events.append(CyclePhase.FAILED)
        if is_due:  # orphans are looked for as often as zombies among the ranks
            self.reap_orphans()
        self._warnings.poll(self.placement)
        if time.monotonic() >= self._ask_times_at:
            ran_s = time.monotonic() - self.processes.started_ns / 1e9
            self._ask_times_at = time.monotonic() + min(ran_s, _ASK_S)
            self.record_times()
            self.monitors.ask_times()
        return events

    def _receive_before_ends(self, ended: Sequence[int]) -> list[Event]:
        """Receives what monitors have not passed on yet, where the next steps of `poll` depend on it.

        What a rank sent just before its death decides what the death means: a request, an exception, or the last report
        of its wrapper. Its monitor sends all of this before it answers the request for a snapshot. Where level 1
        handles the death, or a notice of an earlier one has ended, the reports of all ranks decide what follows.

        Args:
            ended: local ranks whose end was seen just now.
        """
        events = list[Event]()
        if ended and not self.in_process.needs_all_reports(ended):
            self.monitors.snapshots(of=ended)
            events += self.receive()
        if self.in_process.needs_all_reports(ended):
            self.monitors.snapshots()
            events += self.receive()
        return events

    def receive(self, is_over: bool = False) -> list[Event]:
        """Receives and records all messages of the monitors; returns the events among them.

        Called by `poll`, and by `fault_finding.py` when the cycle has ended. Blocks for a second at most, where a rank
        stalls and all ranks are asked for their stacks.

        Args:
            is_over: whether the cycle has ended. In-process restart gets no message then: it would start ranks again.
        """
        self.parts.injected.poll(self.cycle, self.parts.recorder, self.monitors, self.parts.zygotes)
        events: list[Event] = []
        stall: Verdict | None = None
        for local_rank, message in self.monitors.handle():
            rank, stack_file = self.global_rank(local_rank), self.monitors.stack_file(local_rank)
            if isinstance(message, Replaced):
                self.parts.recorder.monitor_replaced(self.cycle, rank, message.reason)
                continue
            self.parts.recorder.monitor_reported(self.cycle, local_rank, rank, message, stack_file)
            if (
                isinstance(message, Verdict)
                and message.limit == STALL
                and self.monitors.report(local_rank).exception is None
            ):
                # One warning is for all ranks. A rank with an exception does not stall: its way out takes long.
                stall = stall or message
            if not (is_over and isinstance(message, RestartReport)):
                events += self._events_of(local_rank, message)
        if stall is not None and self._warnings.stalled(self.placement, stall, self.processes):
            events += self.receive(is_over)  # Messages may have arrived while the ranks were asked for stacks.
        return events

    def _events_of(self, local_rank: int, message: Message) -> list[Event]:
        """Passes on one message of a monitor; returns the events that it means for the cycle.

        Each kind of message has one receiver. Kinds without a case here are evidence only, which the rank's report has.

            Verdict (condemned)   the cycle fails when the rank has ended, with whatever code
            Fenced                the cycle ends: the monitors kill the ranks
            ProgramFailed         `FailedPrograms` kills the rank if its process does not end
            GroupMade             the warnings about hangs learn of a group
            ModulesImported       the zygote learns which modules to import for the next cycle
            RestartReport         in-process restart
            StateLoaded           from where the training goes on, for journal and console
            Suspected             NCCL is asked now; for a wrapped rank all nodes are asked for stacks
            ControlRequest        the cycle ends by the request
        """
        match message:
            case Verdict(condemned=True):
                return [Condemned(local_rank)]
            case Fenced():
                return [CyclePhase.FENCED]
            case ProgramFailed(exit_code=exit_code) if local_rank in self.running():
                pid = self.processes.pids()[local_rank]
                self._failed_programs.begin(local_rank, pid, exit_code, time.monotonic())
            case GroupMade():
                self._warnings.made_group(local_rank, message)
            case ModulesImported() if self.placement.max_restarts > 0:
                self.parts.zygotes.learn(message.names, message.changed)
            case RestartReport():
                self.in_process.on_message(local_rank, message)
            case StateLoaded():
                self.state.on_loaded(self.cycle, message, self.placement.has_rank0)
            case Suspected(is_wrapped=is_wrapped):
                self.ask_nccl()
                if is_wrapped:
                    self.in_process.suspected()
            case ControlRequest():
                return self._on_request(local_rank, message)
        return []

    def _end_failed_programs(self) -> None:
        """Kills ranks whose program has failed and whose process does not end. A later poll takes the exit codes.

        The exit code that counts is that of the program: the SIGKILL is this launcher's, and no fault.
        """
        for local_rank, (exit_code, reason) in self._failed_programs.due(time.monotonic()).items():
            self.parts.recorder.never_ends(
                self.cycle, self.global_rank(local_rank), self._failure_in_words(local_rank), reason
            )
            self.processes.give_up(local_rank, exit_code)

    def _failure_in_words(self, local_rank: int) -> str:
        """Returns in words how the program of a rank ended: by which exception, or with which exit code."""
        report = self.monitors.report(local_rank)
        exception = report.exception or report.incomplete_exception()
        if exception is not None:
            return what_was_raised(exception)
        if report.failed is not None:
            return f"exits with code {report.failed.exit_code}"
        return "failed"

    def ask_nccl(self, again_s: float = nccl_ras.AGAIN_S) -> None:
        """Asks NCCL's RAS service which ranks it reaches. Does not block: `nccl.view` has the answer later.

        Only the first `_ASKING_NODES` nodes ask: each answer covers the whole job.

        Args:
            again_s: seconds for which an earlier answer is new enough, so that none is asked for.
        """
        if self.placement.node_rank < _ASKING_NODES:
            pids = self.processes.pids().values()
            self.nccl.ask(time.monotonic(), self.placement.world_size, pids, again_s)

    def _on_request(self, local_rank: int, request: ControlRequest) -> list[Event]:
        """Notes a rank's request if it can be followed; the request then ends the cycle. The first one counts.

        It cannot be followed where it is of a later release of the client, or where the rendezvous has no coordinator
        to pass it on. The journal has it in any case.
        """
        if not (is_known(request) and self._follows_requests):
            self._complaints.about("request", "the request is written down and not acted on")
            return []
        if self.request is None:
            self.request = RankRequest(self.global_rank(local_rank), request)
        return [CyclePhase.ASKED]

    # Stop.

    def tree(self, among: Callable[[int, int], bool] = lambda pid, session: True) -> ProcessTree:
        """Returns the processes of the cycle: the ranks and all that they have started, but no process of the launcher.

        They are found by the job's tag in their environments and by their parents, when the tree is searched.

        Args:
            among: called with pid and session of a process; returns whether the tree is to include it. By default all.
        """
        return ProcessTree(
            self.parts.runtime.tag,
            ranks=self._running_pids(),
            keep=self._own_pids(),
            adopt_orphans=self.parts.adopt_orphans,
            among=among,
            on_reaped=self.parts.shared_memory.note,
        )

    def _running_pids(self) -> set[int]:
        """Returns the pids of the ranks whose exit code was not taken yet."""
        if self._processes is None:
            return set()
        pids = self._processes.pids()
        return {pids[local_rank] for local_rank in self.running()}

    def _own_pids(self) -> set[int]:
        """Returns the pids of the launcher's own processes. They are its children, as orphans of ranks are, and must
        not be taken for these."""
        checks = self.parts.health.pids() | self.parts.memory.pids() | self.parts.state_in_memory.pids()
        if self.parts.health_watch is not None:
            checks |= self.parts.health_watch.pids()
        return self.monitors.pids() | self.parts.zygotes.pids() | checks

    def reap_orphans(self) -> None:
        """Takes the exit codes of processes that ranks left without a parent and that have ended. Does not block."""
        if self._processes is not None:
            self._sessions |= set(self._processes.pids().values())
        self._orphans.reap(self._running_pids() | self._own_pids(), self._sessions, time.monotonic())

    def stop(
        self, first: int = signal.SIGTERM, limit_s: float | None = None, tree: ProcessTree | None = None
    ) -> Ending:
        """Ends all processes of the cycle, and takes the exit codes. Does nothing when none runs.

        Blocks until the processes have ended: for `limit_s` and 10 s at most.

        Args:
            first: the signal that all processes get at once. SIGKILL follows.
            limit_s: seconds until SIGKILL; None: `--workers-stop-timeout`. A signal to the launcher may shorten this.
            tree: the processes to end; None: all of the cycle.

        Returns:
            The pids that had to be killed, and those that could not be.
        """
        if limit_s is None:
            limit_s = self.parts.settings.stop.workers_stop_timeout
        if self.hurry is not None:
            limit_s = min(limit_s, self.hurry.time_left())
        stopping = (tree or self.tree()).stop(first, limit_s, meanwhile=self.monitors.end_cycle, hurry=self.hurry)
        if self._processes is not None:
            self._processes.close(signal.SIGTERM)
        if self._in_process is not None:
            self._in_process.close()
        self.reap_orphans()
        self.parts.cycle_info.end()
        self.parts.recorder.stopped(self.cycle, stopping)
        return stopping

    @contained("the time ledger is not kept")
    def record_times(self) -> None:
        """Records the time ledger of one rank, as far as the monitors have sent it.

        One rank stands for all, since ranks take their steps together. It is the lowest rank that the client watches
        and that has run since the start of the cycle.
        """
        if self._processes is None:
            return
        found = []
        for local_rank in self.monitors.local_ranks:
            of_rank = self.monitors.report(local_rank)
            if of_rank.times is not None and of_rank.start is not None:
                began_later = of_rank.start.started_ns > self._processes.started_ns
                order = not of_rank.times.attached, began_later, self.global_rank(local_rank)
                found.append((order, of_rank.start.cycle, of_rank.times))
        if found:
            _, cycle, times = min(found, key=lambda entry: entry[0])
            self.parts.times.record(cycle, times)

    @contained("the state in memory is not recorded")
    def record_state(self) -> None:
        """Records what the ranks of the cycle have kept in memory. Called once they have ended."""
        if self._processes is None:
            return
        snapshots = [self.monitors.report(local_rank).snapshot for local_rank in self.monitors.local_ranks]
        iteration = max((seen.iteration for seen in snapshots if seen is not None), default=NO_ITERATION)
        self.state.cycle_over(self.cycle, self._processes.started_ns, iteration)

    def close(self) -> None:
        """Ends the processes of the cycle and the monitors, at the end of the job. Blocks as `stop`.

        Called by the agent's `_shutdown`, on every path. The monitors' last time ledgers are recorded after them.
        """
        self.stop()
        self.monitors.close()
        self.record_times()
        self.nccl.close()
