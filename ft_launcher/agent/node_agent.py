"""The node agent: torch elastic's local agent, with ranks of this project and a cycle loop that waits for events.

Made by `composition.py` and run by `torch_launch.py`, on the launcher's main thread (or on the thread of `launch()`),
which is "the agent's thread" everywhere. torch's own loop asks the processes every 0.1 s; this one sleeps until a
descriptor is readable.

Here are torch's hooks and the loop of one cycle. `ranks.py` starts and ends the ranks, `agent/cycle/cycle.py` decides
by what happens to the ranks when a cycle has ended, and the membership (`membership.py`) says what follows.

torch's classes call this class, and are called by it, in this order:

    run                                      torch's; until the job has ended on this node
     |- _invoke_run                          ours, in the place of torch's loop
     |   `- _run_cycles, for each cycle:
     |       |- _initialize_workers          torch's; calls the two hooks below it
     |       |   |- _rendezvous              ours: `Membership.form`; the cycle's store, numbers, copies
     |       |   |   `- torch's _rendezvous, which calls `_assign_worker_ranks`: ours, as the coordinator says
     |       |   `- _start_workers           ours: `Ranks.prepare`, `start`, `begin`
     |       |- run_cycle                    waits for events until the cycle has ended
     |       `- Membership.after             stops the ranks; a `JobEnd` ends the loop
     `- _shutdown                            ours, on every path, perhaps twice: closes all, leaves the job

Uses torch's underscored hooks `_invoke_run`, `_construct_event`, `_rendezvous`, `_assign_worker_ranks`,
`_start_workers` and `_shutdown`, its calls `_initialize_workers`, `_monitor_workers`, `_set_local_rank_env`,
`_setup_local_watchdog` and `_setup_healthcheck`, and attributes such as `_worker_group` and `_remaining_restarts`.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from string import Template
from typing import Any

from torch.distributed.elastic.agent.server import api as torch_api
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event as TorchEvent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.utils import macros

from ft_launcher.agent.cycle.cycle import Cycle, CyclePhase
from ft_launcher.agent.ending_signal import EndingSignal
from ft_launcher.agent.event_source import EventSource
from ft_launcher.agent.job_end import JobEnd, NoFurtherCycle
from ft_launcher.agent.membership import Membership
from ft_launcher.agent.own_health import HealthWatch
from ft_launcher.agent.parts import NodeParts
from ft_launcher.agent.ranks import Ranks
from ft_launcher.agent.results import Results
from ft_launcher.agent.state_copies import StateCopies
from ft_launcher.job.rendezvous.cycle_store import CycleStore
from ft_launcher.job.rendezvous.handler import NodeRendezvous
from ft_launcher.node.processes.descriptor_limit import Reserve
from ft_launcher.node.ranks.environment import torch_environment
from ft_launcher.record.journal.contained import contained
from ft_launcher.record.placement import NO_NODE, Placement, RankNumbers
from rank_monitor.contract.processes import resolver
from rank_monitor.contract.processes.wait import readable


class NodeAgent(LocalElasticAgent):  # type: ignore[misc]
    """torch's agent of this node, for one job.

    Args:
        spec: torch's specification of the ranks; its rendezvous handler is a `NodeRendezvous`.
        parts: the objects that this launcher has made for the agent.
        of_torch: the other arguments of torch's agent.

    Attributes:
        results: torch's results of this node's ranks. `composition.py` asks it which ranks' errors are on no console.
    """

    def __init__(self, spec: WorkerSpec, parts: NodeParts, **of_torch: Any) -> None:
        super().__init__(spec, **of_torch)
        self._parts = parts
        self._exit_barrier_timeout = parts.settings.stop.exit_barrier_timeout
        handler: NodeRendezvous = self._rdzv_handler
        lease, linked = None, None
        if not handler.is_local:
            linked = handler
        if handler.lease is not None and handler.lease.fileno() >= 0:
            lease = handler.lease.fileno()
        self._ranks = Ranks(parts, placement_of(self._worker_group), lease, handler.follows_requests)
        self._ending = EndingSignal(self._ranks)
        self._ranks.hurry = self._ending
        self.results = Results(self._ranks, self._ending, torchs_result=self._result)
        self._membership = Membership(self._ranks, self.results, self._ending, handler, self._exit_barrier)
        self._copies = StateCopies(self._ranks)
        handler.copies = self._copies.offer
        self._sources: list[EventSource] = [self._ending, self._ranks, self._membership, self._copies]
        if parts.health_watch is not None:
            self._sources.append(HealthWatch(parts, cycle=lambda: self._ranks.cycle))
        self._sources += parts.more_sources(self._ranks, linked)
        limit_s = parts.settings.monitor.hang_timeout
        if limit_s is not None:
            # Imported here, since psutil takes 20 ms, for which jobs without the option need not wait.
            from ft_launcher.agent.hang_watch import hang_watch

            self._sources.append(hang_watch(self._ranks, limit_s, linked))
        self._job_end: JobEnd | None = None
        self._closed = False

    @property
    def exit_code(self) -> int | None:
        """The launcher's exit code; None: as torch chooses. Known when `run` has ended."""
        if self._job_end is not None:
            return self._job_end.exit_code
        return self._ending.exit_code

    @property
    def grace_ends_at(self) -> float:
        """When the time is over that the ranks had to save after a signal (monotonic seconds); infinity: there was no
        such signal."""
        if math.isinf(self._ending.grace_ends_at):
            return math.inf
        return self._ending.grace_ends_at

    @property
    def reason(self) -> str:
        """Why the job ended; empty where the exception that ended `run` says it."""
        return self._job_end.reason if self._job_end is not None else ""

    def run(self, role: str = torch_api.DEFAULT_ROLE) -> RunResult:
        """Runs the agent until the job has ended on this node, as torch's does. Blocks until then.

        Leaves out torch's line about the signal that ends the launcher. `EndingSignal.end_ranks` has said more by then,
        and torch's line says that ranks are ended which have ended already.
        """
        torchs = logging.getLogger(torch_api.__name__)
        torchs.addFilter(_is_no_signal_line)
        try:
            return super().run(role)
        finally:
            torchs.removeFilter(_is_no_signal_line)

    def _invoke_run(self, role: str = "") -> RunResult:
        """torch's hook: runs cycles until the job has ended for this node; returns torch's result of the last one.

        Raises:
            SignalException: a signal ended the launcher.
        """
        nprocs = self._worker_group.spec.local_world_size
        reserve = Reserve(nprocs)
        try:
            self._job_end = self._run_cycles(nprocs, reserve)
        except NoFurtherCycle as over:
            self._job_end = over.end
        finally:
            # The process may go on: `launch()` was called by the user's program, which needs the descriptors.
            reserve.free()
        return self._job_end.result

    def _run_cycles(self, nprocs: int, reserve: Reserve) -> JobEnd:
        """Runs cycles until the membership says how the job has ended.

        Each turn: forms the cycle and starts the ranks (torch's `_initialize_workers`, which calls the hooks below),
        waits for the end of the cycle, and has the membership end the ranks and learn what follows.

        Args:
            nprocs: number of ranks of this node.
            reserve: descriptors for the restart. A job that has used up all others could not restart without it.
        """
        while True:
            self._initialize_workers(self._worker_group)
            reserve.fill()
            with ExitStack() as contexts:
                for source in self._sources:
                    contexts.enter_context(source.during_cycle())
                phase = run_cycle(nprocs, self._sources)
            self._parts.times.cycle_over()
            reserve.await_enough(self._ending.wait)
            if self._ending.number is not None:
                # A signal wins over whatever ended the cycle meanwhile: who sent it will not wait for a restart.
                phase = CyclePhase.SIGNALLED
            try:
                job_end = self._membership.after(phase)
            finally:
                self._ranks.record_times()
                self._copies.cycle_over()
                self._ranks.record_state()
                self._parts.times.stopped()
            if job_end is not None:
                return job_end
            with contained("what dead processes left in /dev/shm is not removed"):
                self._parts.shared_memory.begin()

    def _construct_event(self, *args: Any, **kwargs: Any) -> TorchEvent:
        """torch's hook: makes one of torch's events, without asking a name server.

        Each event has the host's full name. Looking it up takes a second or more where a resolver is slow, and a
        restart of two ranks makes four events. What /etc/hosts says must do.
        """
        with resolver.unasked():
            return super()._construct_event(*args, **kwargs)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """torch's hook: forms the next cycle, and says where its ranks meet.

        Blocks until this node has a place, and then while it fetches a state in memory that it lacks. The membership
        calls torch's own `_rendezvous` back, in a thread, once the node is healthy: a signal can end the wait for the
        other nodes, which torch's code has no way to interrupt.

        Raises:
            NoFurtherCycle: the job is over for this node.
            SignalException: the launcher got a signal.
        """
        rendezvous = super()._rendezvous
        store = self._membership.form(lambda: rendezvous(worker_group))
        self._ranks.store = store
        worker_group.master_addr = store.host
        worker_group.master_port = store.master_port
        # torch's events say how many restarts there were, which torch computes from this.
        self._remaining_restarts = worker_group.spec.max_restarts - store.cycle
        self._ranks.placement = placement_of(worker_group, store)
        if self._ranks.placement.has_rank0:
            self._parts.cycle_info.begin(store.cycle, *self._rdzv_handler.names())
        self._copies.begin(self._rdzv_handler.place.copies, self._rdzv_handler)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """torch's hook: numbers the ranks of this node, as the coordinator says.

        torch's own way: each agent writes the number of its ranks to a store of all, and the first one answers. That is
        left to a rendezvous that is not ours.
        """
        handler: NodeRendezvous = self._rdzv_handler
        if not handler.numbers_ranks:
            workers: list[Worker] = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
            return workers
        place = handler.place
        assert place is not None, "the rendezvous has just given this node a place"
        return [
            Worker(
                local_rank=local_rank,
                global_rank=place.first_rank + local_rank,
                role_rank=place.first_role_rank + local_rank,
                world_size=place.world_size,
                role_world_size=place.role_world_size,
            )
            for local_rank in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        """torch's hook: starts the ranks, with the environment that torchrun documents. Returns pids by local rank.

        The environment is made in two steps: what torchrun documents here, and this project's variables in
        `Ranks.start`. Arguments may contain torch's macro for the local rank, which is replaced here.
        """
        self._ranks.bring_state_back()
        self._ranks.prepare()
        spec, placement = worker_group.spec, self._ranks.placement
        envs = {each.local_rank: torch_environment(placement, each, os.environ) for each in placement.ranks}
        # The hook is of `--virtual-local-rank`, which torch 2.6 does not have.
        if hasattr(self, "_set_local_rank_env"):
            for local_rank, variables in envs.items():
                self._set_local_rank_env(variables, local_rank, spec)
        self._setup_local_watchdog(envs=envs)
        self._setup_healthcheck()
        self._pcontext = self._ranks.start(
            name=spec.role,
            entrypoint=spec.entrypoint,
            args={rank: tuple(macros.substitute(list(spec.args), str(rank))) for rank in envs},
            envs=envs,
            logs_specs=self._logs_specs,
            log_line_prefixes=self._line_prefixes(placement),
            start_method=self._start_method,
            **_of_context(spec),
        )
        self._ranks.begin(self._pcontext)
        pids: dict[int, int] = self._pcontext.pids()
        return pids

    def _line_prefixes(self, placement: Placement) -> dict[int, str] | None:
        """Returns what the lines of each rank begin with on the console, by local rank; None: as torch chooses.

        `${hostname}` is the short name, as with torch 2.14; releases before it leave the word as it is.
        """
        if not self._log_line_prefix_template:
            return None
        template = Template(self._log_line_prefix_template)
        hostname = socket.gethostname()
        return {
            each.local_rank: template.safe_substitute(
                role_name=placement.role, rank=each.rank, local_rank=each.local_rank, hostname=hostname
            )
            for each in placement.ranks
        }

    def _result(self) -> RunResult:
        """Returns torch's result of the ranks of the cycle. Called by `Results`, when all ranks have ended."""
        # torch compares the pids of its workers with those of the context, and an in-process restart may have changed
        # the latter.
        for local_rank, pid in self._pcontext.pids().items():
            self._worker_group.workers[local_rank].id = pid
        return self._monitor_workers(self._worker_group)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """torch's hook at the very end, on every path: closes all that this agent started or holds, then leaves the
        job. torch may call it twice.

        The zygote ends first, so that no rank is started any more, then the ranks, then their monitors. The job is left
        last: until then this node may still host a store that other nodes use.
        """
        if not self._closed:
            self._closed = True
            self._parts.zygotes.close()
            self._parts.injected.close()
            self._parts.health.close()
            if self._parts.health_watch is not None:
                self._parts.health_watch.close()
            self._ranks.close()
            self._parts.ports.close()
            self._parts.cycle_info.close()
        super()._shutdown(*args, **kwargs)
        self._membership.leave(self._job_end)


def placement_of(group: WorkerGroup, store: CycleStore | None = None) -> Placement:
    """Returns what torch's group of workers says of this node's part in a cycle.

    Args:
        group: torch's.
        store: the store of the cycle; None: there was no cycle yet, and the numbers are torch's initial ones.
    """
    spec, workers = group.spec, group.workers
    cycle, node_rank, master, shares_store = 0, NO_NODE, ("", 0), False
    if store is not None:
        cycle, node_rank, master = store.cycle, int(group.group_rank), (store.host, store.master_port)
        shares_store = bool(spec.rdzv_handler.use_agent_store)
    return Placement(
        cycle=cycle,
        node_rank=node_rank,
        nodes=int(group.group_world_size or 0),
        ranks=tuple(RankNumbers(int(each.local_rank), int(each.global_rank), int(each.role_rank)) for each in workers),
        world_size=int(workers[0].world_size),
        role=spec.role,
        role_world_size=int(workers[0].role_world_size),
        run_id=spec.rdzv_handler.get_run_id(),
        max_restarts=int(spec.max_restarts),
        master_addr=master[0],
        master_port=master[1],
        shares_store=shares_store,
    )


def _of_context(spec: WorkerSpec) -> dict[str, Any]:
    """Returns those fields of torch's specification that its context of processes also takes, such as bindings and
    filters of logs.

    The names are read off both classes, since each release of torch has added some.
    """
    of_context = inspect.signature(SubprocessContext.__init__).parameters.keys() - {"entrypoint", "args"}
    return {name: value for name, value in vars(spec).items() if name in of_context}


def _is_no_signal_line(record: logging.LogRecord) -> bool:
    """Returns whether a log record is any other than torch's line about the signal. For a logging filter."""
    return not str(record.msg).startswith("Received %s death signal")


def run_cycle(rank_count: int, sources: Sequence[EventSource]) -> CyclePhase:
    """Waits for the events of one cycle until it has ended; returns the phase in which it ended.

    Sleeps until a descriptor is readable, or until the earliest moment that a source has named, without polling. This
    loop is the only place where the agent waits while ranks run.

    Args:
        rank_count: number of ranks of this node.
        sources: all are polled at each wake-up, in this order, whichever has woken the loop. The first event that ends
            the cycle counts, so a signal goes before the end of a rank.
    """
    cycle = Cycle(rank_count)
    while cycle.phase is CyclePhase.RUNNING:
        descriptors = set[int]().union(*(source.descriptors() for source in sources))
        checks = [source.next_check() for source in sources]
        due = min((moment for moment in checks if moment is not None), default=None)
        ready = readable(descriptors, None if due is None else max(0.0, due - time.monotonic()))
        for source in sources:
            for event in source.poll(ready):
                cycle.on(event)
    return cycle.phase
