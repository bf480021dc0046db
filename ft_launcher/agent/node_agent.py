"""The node agent: torch elastic's local agent, with our ranks and a cycle loop that waits for events.

torch's launcher makes and runs it. Here are torch's hooks and the loop of one cycle: `ranks.py` starts and ends the
ranks, `agent/cycle/cycle.py` decides by what happens to them when a cycle has ended, and the membership
(`single_node.py`, `many_nodes.py`) says what follows.

Uses torch's underscored hooks `_invoke_run`, `_construct_event`, `_rendezvous`, `_start_workers` and `_shutdown`, its
calls `_initialize_workers` and `_monitor_workers`, attributes such as `_worker_group` and `_remaining_restarts`, and
the name `start_processes` of its module, rebound while torch starts ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch.distributed.elastic.agent.server import api as torch_api
from torch.distributed.elastic.agent.server import local_elastic_agent as torch_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event as TorchEvent

from ft_launcher.agent.cycle.cycle import Cycle, CyclePhase
from ft_launcher.agent.ending_signal import EndingSignal
from ft_launcher.agent.many_nodes import ManyNodes
from ft_launcher.agent.membership import EventSource, JobEnd, Membership, NoFurtherCycle
from ft_launcher.agent.own_health import HealthWatch
from ft_launcher.agent.parts import NodeParts
from ft_launcher.agent.ranks import Ranks
from ft_launcher.agent.results import Results
from ft_launcher.agent.single_node import SingleNode
from ft_launcher.job.rendezvous.handler import NodeRendezvous
from ft_launcher.node.processes.descriptor_limit import Reserve
from ft_launcher.record.journal.contained import contained
from rank_monitor.contract.processes import resolver
from rank_monitor.contract.processes.wait import readable


class NodeAgent(LocalElasticAgent):  # type: ignore[misc]
    """torch's agent of this node, for one job."""

    def __init__(self, *args: Any, parts: NodeParts, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts = parts
        self._exit_barrier_timeout = parts.settings.stop.exit_barrier_timeout
        handler = self._rdzv_handler
        is_ours, lease = isinstance(handler, NodeRendezvous), None
        if is_ours and handler.lease.fileno() >= 0:
            lease = handler.lease.fileno()
        # torch's own rendezvous cannot pass a request on to other nodes.
        follows_requests = is_ours or not parts.several_nodes
        self._ranks = Ranks(parts, self._worker_group, lease, follows_requests)
        self._ending = EndingSignal(self._ranks)
        self._ranks.hurry = self._ending
        self.results = Results(self._ranks, self._ending, self._monitor_workers)
        self._membership: Membership
        if is_ours:
            self._membership = ManyNodes(self._ranks, self.results, self._ending, handler)
        else:
            self._membership = SingleNode(self._ranks, self.results, self._ending, self._exit_barrier)
        self._sources: list[EventSource] = [self._ending, self._ranks, self._membership]
        if parts.health_watch is not None:
            self._sources.append(HealthWatch(parts, lambda: self._ranks.cycle))
        self._sources += parts.more_sources(self._ranks, handler if is_ours else None)
        limit_s = parts.settings.monitor.hang_timeout
        if limit_s is not None:
            from ft_launcher.agent.hang_watch import hang_watch  # 20 ms for psutil, which other jobs need not wait

            self._sources.append(hang_watch(self._ranks, limit_s, handler if is_ours else None))
        self._job_end: JobEnd | None = None
        self._closed = False

    @property
    def exit_code(self) -> int | None:
        """The launcher's exit code; None: as torch chooses."""
        if self._job_end is not None:
            return self._job_end.exit_code
        return self._ending.exit_code

    @property
    def reason(self) -> str:
        """Why the job ended; empty where that is known from elsewhere."""
        return self._job_end.reason if self._job_end is not None else ""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's, without its line about the signal that ends the launcher. `EndingSignal.end_ranks` has said more,
        and when torch says that it ends the ranks they have ended."""
        torchs = logging.getLogger(torch_api.__name__)
        torchs.addFilter(_is_no_signal_line)
        try:
            return super().run(*args, **kwargs)
        finally:
            torchs.removeFilter(_is_no_signal_line)

    def _invoke_run(self, role: str = "") -> RunResult:
        """torch's hook: runs cycles until the job has ended for this node."""
        nprocs = self._worker_group.spec.local_world_size
        reserve = Reserve(nprocs)
        try:
            self._job_end = self._run_cycles(nprocs, reserve)
        except NoFurtherCycle as over:
            self._job_end = over.end
        finally:
            reserve.release()  # `launch()` goes on in the user's program
        return self._job_end.result

    def _run_cycles(self, nprocs: int, reserve: Reserve) -> JobEnd:
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
                self._ranks.take_times()
                self._parts.times.stopped()
            if job_end is not None:
                return job_end
            with contained("what dead processes left in /dev/shm is not removed"):
                self._parts.shared_memory.begin()

    def _construct_event(self, *args: Any, **kwargs: Any) -> TorchEvent:
        """torch's hook: makes one of torch's events. The host's full name is in each, a look-up of a second or more
        where a resolver is slow; what /etc/hosts says must do: a restart makes four of them with two ranks."""
        with resolver.unasked():
            return super()._construct_event(*args, **kwargs)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """torch's hook: forms the next cycle, and says where its ranks meet."""
        rendezvous = super()._rendezvous
        store = self._membership.form(lambda: rendezvous(worker_group))
        self._ranks.store = store
        worker_group.master_addr = store.host
        worker_group.master_port = store.master_port
        # For `TORCHELASTIC_RESTART_COUNT`: torch computes it from this, and it is the number of the cycle on all nodes.
        self._remaining_restarts = worker_group.spec.max_restarts - store.cycle
        if worker_group.group_rank == 0:
            self._parts.cycle_info.begin(store.cycle, *self._membership.names())

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """torch's hook: has torch make the ranks' environments, and starts them in our context."""
        self._ranks.prepare()
        before = torch_agent.start_processes
        # torch has no hook for the context: `LocalElasticAgent` calls this name of its module.
        torch_agent.start_processes = self._ranks.start_processes
        try:
            pids: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            torch_agent.start_processes = before
        self._ranks.begin(self._pcontext)
        if not self._membership.needs_agents_store:
            # Ranks are assigned: its connection is one of the descriptors of the node that hosts it.
            worker_group.store = self._store = None
        return pids

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """torch's hook at the very end, on every path: closes all that this agent started or holds."""
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


def _is_no_signal_line(record: logging.LogRecord) -> bool:
    """For a filter: lets pass all but torch's line about the signal."""
    return not str(record.msg).startswith("Received %s death signal")


def run_cycle(rank_count: int, sources: Sequence[EventSource]) -> CyclePhase:
    """Waits for the events of one cycle until it has ended; returns the phase in which it did.

    Args:
        rank_count: number of ranks of this node.
        sources: attended in this order at each wake-up, whichever of them has woken the loop.
    """
    cycle = Cycle(rank_count)
    while cycle.phase is CyclePhase.RUNNING:
        descriptors = set[int]().union(*(source.descriptors() for source in sources))
        checks = [source.next_check() for source in sources]
        due = min((moment for moment in checks if moment is not None), default=None)
        ready = readable(descriptors, None if due is None else max(0.0, due - time.monotonic()))
        for source in sources:
            for event in source.attend(ready):
                cycle.on(event)
    return cycle.phase
