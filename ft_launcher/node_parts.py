"""What the agent of a node works with, made by `composition.py`. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from ft_launcher.cycle_files import CycleInfo
from ft_launcher.cycle_store import PortHolder
from ft_launcher.health.memory_reclaim import GpuMemory
from ft_launcher.health.node_health import NodeHealth
from ft_launcher.injected import Injected
from ft_launcher.recorder import Recorder
from ft_launcher.runtime import Runtime
from ft_launcher.signals import SignalPipe
from ft_launcher.zygote_pool import ZygotePool
from rank_monitor.contract.config import Settings


@dataclass
class NodeParts:
    """The parts. `adopt_orphans`: every child of this process is the job's, as it is not inside a user's program.

    `named_signals` are those that the user named in `--signals-to-handle`. `is_script`: what the ranks run is Python's,
    `-u [-m] SCRIPT ...`.
    `limits_given`: options of limits that only act in a watched training. `nccl_bound`: how long a hang in NCCL lasts.
    """

    settings: Settings
    runtime: Runtime
    recorder: Recorder
    signals: SignalPipe
    ports: PortHolder
    zygotes: ZygotePool
    health: NodeHealth
    memory: GpuMemory
    injected: Injected
    cycle_info: CycleInfo
    several_nodes: bool
    named_signals: frozenset[int] = frozenset()
    limits_given: tuple[str, ...] = ()
    nccl_bound: str = ""
    adopt_orphans: bool = True
    is_script: bool = False
