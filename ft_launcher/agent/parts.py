"""`NodeParts`: the objects that the node agent is given. Made by `composition.py`, which knows how; data only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_launcher.agent.cycle.fault_injection import Injected
from ft_launcher.agent.times import NodeTimes
from ft_launcher.job.rendezvous.cycle_store import PortHolder
from ft_launcher.node.health.memory_reclaim import MemoryReclaim
from ft_launcher.node.health.node_health import NodeHealth
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

    `more_sources`: makes the sources of events by which the tools see the ranks; the rendezvous is None where it is not
    ours. `more_environment`: the variables that tools add for the ranks of a cycle; the arguments are the cycle and
    whether rank 0 starts on this node. `adopt_orphans`: every child of this process belongs to the job; False inside a
    user's program. `named_signals`: those named in `--signals-to-handle`. `is_script`: the ranks run Python,
    `-u [-m] SCRIPT ...`. `limits_set`: options that were set and act only in a watched training. `in_process_limits`:
    those of restarts in process that were set. `nccl_bound`: a text, how long a hang in NCCL may last.
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
