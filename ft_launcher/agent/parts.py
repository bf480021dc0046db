"""`NodeParts`: the objects that the node agent is given. Data only.

`composition.py` makes them, so the agent knows no option's name, and a test of the agent gives it other objects. The
agent, the ranks and the membership of one launcher share one `NodeParts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_launcher.agent.cycle.fault_injection import Injected
from ft_launcher.agent.times import NodeTimes
from ft_launcher.job.rendezvous.cycle_store import PortHolder
from ft_launcher.node.health.memory_reclaim import MemoryReclaim
from ft_launcher.node.health.node_health import NodeHealth
from ft_launcher.node.memory_files.job_folder import JobFolder
from ft_launcher.node.processes.shared_memory_cleanup import SharedMemoryCleanup
from ft_launcher.node.processes.signals import SignalPipe
from ft_launcher.node.ranks.runtime import Runtime
from ft_launcher.node.zygote.pool import ZygotePool
from ft_launcher.record.logs.cycle_files import CycleInfo
from ft_launcher.record.recorder import Recorder
from rank_monitor.contract.rounds.escalation import LimitsSet
from rank_monitor.contract.settings.config import Settings

if TYPE_CHECKING:
    from ft_launcher.agent.event_source import EventSource
    from ft_launcher.agent.ranks import Ranks
    from ft_launcher.job.rendezvous.handler import NodeRendezvous


@dataclass
class NodeParts:
    """The parts of one launcher.

    Attributes:
        settings: all settings of this launcher.
        runtime: the job's tag, its runtime folder and the template process.
        recorder: writes journal, log and console lines.
        times: the time ledger of this node.
        signals: the signals that end the launcher.
        ports: the ports that this node holds for the stores of cycles.
        zygotes: starts ranks as forks.
        health: the checks before each cycle.
        health_watch: the checks that are repeated while ranks run; None: none is.
        memory: waits for the memory of GPUs before each cycle.
        shared_memory: removes what dead ranks left in /dev/shm.
        state_in_memory: the folder in which ranks keep the training's state.
        injected: the faults on purpose that ranks report.
        cycle_info: the files about the present cycle that users' programs read.
        in_process_limits: the limits of in-process restarts that the user set.
        more_sources: called with the ranks and the rendezvous (None: it is not ours). Returns the sources of events by
            which tools see the ranks, such as the status page.
        more_environment: called with the cycle's number and whether rank 0 starts on this node. Returns more variables
            for the ranks: those of tools, and where the training's state is kept in memory.
        several_nodes: whether the job may have more than one node.
        named_signals: the signals that the user named in `--signals-to-handle`.
        limits_set: the options that the user set and that act only in a training which the client watches.
        nccl_bound: a text, how long a hang in NCCL may last.
        adopt_orphans: whether every child of this process belongs to the job; False inside a user's program.
        is_script: whether the ranks run Python (`-u [-m] SCRIPT ...`).
    """

    settings: Settings
    runtime: Runtime
    recorder: Recorder
    times: NodeTimes
    signals: SignalPipe
    ports: PortHolder
    zygotes: ZygotePool
    health: NodeHealth
    health_watch: NodeHealth | None
    memory: MemoryReclaim
    shared_memory: SharedMemoryCleanup
    state_in_memory: JobFolder
    injected: Injected
    cycle_info: CycleInfo
    in_process_limits: LimitsSet
    more_sources: Callable[[Ranks, NodeRendezvous | None], Sequence[EventSource]]
    more_environment: Callable[[int, bool], Mapping[str, str]]
    several_nodes: bool
    named_signals: frozenset[int] = frozenset()
    limits_set: tuple[str, ...] = ()
    nccl_bound: str = ""
    adopt_orphans: bool = True
    is_script: bool = False
