"""In-process restart as Megatron Bridge configures it: plain numbers in seconds, and the wrapper that they describe.

Scripts make an `InProcessRestartConfig`, from a YAML file for instance, and decorate their function with its
`wrapper()`. This file decides nothing itself: every callback and limit that it puts together comes from the other files
of this package. The names and defaults of the options are those of Megatron Bridge's own configuration.
"""

from __future__ import annotations

import datetime
import math
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft_client.inprocess.abort import AbortTorchDistributed, AbortTransformerEngine
from ft_client.inprocess.arguments import Timeouts
from ft_client.inprocess.compose import Compose
from ft_client.inprocess.finalize import ThreadedFinalize
from ft_client.inprocess.health_check import CudaHealthCheck, FaultCounter
from ft_client.inprocess.initialize import RetryController
from ft_client.inprocess.nested_restarter import (
    NestedRestarterAborted,
    NestedRestarterFinalized,
    NestedRestarterHandlingCompleted,
    NestedRestarterHandlingStarting,
)
from ft_client.inprocess.rank_assignment import Layer, LayerFlag, Tree, at_least
from ft_client.inprocess.state import State

if TYPE_CHECKING:
    from ft_client.inprocess.wrapper import Wrapper

_CALLBACK_LIMIT = datetime.timedelta(seconds=10)
"""For the CUDA health check and `empty_cache`: as in Megatron-LM (`inprocess_restart.py`), for the same callbacks."""
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
)
"""How many ranks this node has: torchrun's and ours, Open MPI's, MPICH's and Intel's, MVAPICH's, HPE's."""
_OF_SLURM = "SLURM_STEP_TASKS_PER_NODE"
"""Slurm's variable with the tasks of each node of a step, in order, such as `4(x2),3`: 4 on two nodes, then 3."""
GRANULARITIES = ("node", "rank")
"""What is given up with a lost rank: its whole node, or the rank alone."""


@dataclass(kw_only=True)
class InProcessRestartConfig:
    """Options of in-process restart. Durations are seconds. Can be changed until it is used, as Bridge's own can.

    Example:

        config = InProcessRestartConfig(enabled=True, granularity="rank", max_iterations=10)
        train = config.wrapper()(train)

    Attributes:
        enabled: whether the function is wrapped at all.
        active_world_size: how many ranks call the function, all others being spares; None: all ranks.
        granularity: what is given up with a lost rank: "node", its whole node, or "rank", the rank alone.
        max_iterations: how many of our rounds may run; None: no limit.
        empty_cuda_cache: whether torch's cache of CUDA memory is emptied after a fault.
        max_rank_faults: how many faults a rank may have before it ends; None: no limit.
        monitor_process_logdir: folder for the log of rank 0's monitor process; None: no log.

    All durations are explained at `arguments.py: Timeouts`.
    """

    enabled: bool = False
    active_world_size: int | None = None
    granularity: str = "node"
    max_iterations: int | None = None
    soft_timeout: float = 60.0
    hard_timeout: float = 90.0
    heartbeat_interval: float = 30.0
    heartbeat_timeout: float = 60.0
    monitor_thread_interval: float = 1.0
    monitor_process_interval: float = 1.0
    progress_watchdog_interval: float = 1.0
    barrier_timeout: float = 120.0
    completion_timeout: float = 120.0
    last_call_wait: float = 1.0
    termination_grace_time: float = field(default=1.0)
    empty_cuda_cache: bool = True
    max_rank_faults: int | None = None
    monitor_process_logdir: str | None = None

    def wrapper(self, environment: Mapping[str, str] | None = None, **more: Any) -> Wrapper:
        """Returns the wrapper that these options describe.

        Args:
            environment: the variables of the rank; None: those of this process.
            **more: further arguments of `Wrapper`. A callback given here is called before the callback of the options.

        Raises:
            TypeError, ValueError: an option or argument has no possible value; or, when enabled, RANK or WORLD_SIZE is
                missing.
        """
        from ft_client.inprocess.wrapper import Wrapper  # torch, which reading the options needs not

        if environment is None:
            environment = os.environ
        durations = asdict(self.timeouts())
        if not self.enabled:
            return Wrapper(**{**durations, **more, "enabled": False})
        state = State.from_env(environment)
        active = self.active_world_size or state.world_size
        callbacks = _callbacks(self, active)
        assignment = Tree(_layers(self, environment, active, state.world_size))
        arguments: dict[str, Any] = {**durations, **callbacks, "rank_assignment": assignment}
        if self.monitor_process_logdir is not None and state.rank == 0:
            name = logfile_name(environment, socket.gethostname())
            arguments["monitor_process_logfile"] = str(Path(self.monitor_process_logdir, name))
        for name, value in more.items():
            if name in callbacks and value is not None:
                arguments[name] = Compose(callbacks[name], value)
            else:
                arguments[name] = value
        return Wrapper(**arguments)

    def timeouts(self) -> Timeouts:
        """Returns the durations, checked against each other. Checks all other options as well.

        Raises:
            TypeError: an option has the wrong type; the text names it.
            ValueError: an option has no possible value, or a relation between two is violated.
        """
        for name in ("enabled", "empty_cuda_cache"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} is not a bool")
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity={self.granularity!r} is neither 'node' nor 'rank'")
        for name, least in (("active_world_size", 1), ("max_iterations", 1), ("max_rank_faults", 0)):
            at_least(least, name, getattr(self, name))
        if self.monitor_process_logdir is not None and not isinstance(self.monitor_process_logdir, str):
            raise TypeError(f"monitor_process_logdir={self.monitor_process_logdir!r} is not a text")
        durations = {field.name for field in fields(Timeouts)}
        return Timeouts(**{name: _duration(name, value) for name, value in asdict(self).items() if name in durations})


def logfile_name(environment: Mapping[str, str], hostname: str) -> str:
    """Returns the name of the log in `monitor_process_logdir`: with `none` where Slurm says nothing."""
    job, process, local = (environment.get(f"SLURM_{name}", "none") for name in ("JOB_ID", "PROCID", "LOCALID"))
    return f"monitor_{job}_{hostname}_{process}_{local}.log"


def _duration(name: str, value: object) -> datetime.timedelta:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not a number of seconds")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is not finite")
    return datetime.timedelta(seconds=value)


def _callbacks(config: InProcessRestartConfig, active: int) -> dict[str, Callable[..., Any]]:
    """Returns the callbacks of the wrapper, by argument. A `Compose` runs its last callback first."""
    callbacks: dict[str, Callable[..., Any]] = {
        "initialize": Compose(
            RetryController(config.max_iterations, min_world_size=active), NestedRestarterHandlingCompleted()
        ),
        "abort": Compose(AbortTransformerEngine(), AbortTorchDistributed(), NestedRestarterHandlingStarting()),
        "health_check": Compose(CudaHealthCheck(_CALLBACK_LIMIT), FaultCounter(config.max_rank_faults)),
        "completion": NestedRestarterFinalized(),
        "terminate": NestedRestarterAborted(),
    }
    if config.empty_cuda_cache:
        import torch

        callbacks["finalize"] = ThreadedFinalize(_CALLBACK_LIMIT, torch.cuda.empty_cache)
    return callbacks


def _layers(
    config: InProcessRestartConfig, environment: Mapping[str, str], active: int, world_size: int
) -> list[Layer]:
    """Returns the layers of the tree: all ranks; below them, with granularity "node", the nodes.

    A node that has lost a rank has fewer than its `min_ranks`, and is given up as a whole.
    """
    layers = [Layer(min_ranks=active, max_ranks=active, flag=LayerFlag.RESERVE)]
    if config.granularity == "node":
        per_node = _ranks_per_node(environment, world_size)
        node = socket.gethostname()
        layers.append(Layer(min_ranks=per_node, max_ranks=per_node, key_or_fn=node, flag=LayerFlag.RESERVE))
    return layers


def _ranks_per_node(environment: Mapping[str, str], world_size: int) -> int:
    """Returns how many ranks each node has: as a launcher's variable says, else the number of this node's GPUs.

    Raises:
        ValueError: no variable says it and there is no GPU: a guess would make ranks spares without a word. Or a
            variable has no possible value, or the nodes have different numbers of ranks.
    """
    for name in _LOCAL_SIZES:
        if name in environment:
            return _possible(name, environment[name], environment[name], world_size)
    if _OF_SLURM in environment:
        counts = {part.partition("(")[0] for part in environment[_OF_SLURM].split(",")}
        if len(counts) > 1:
            text = environment[_OF_SLURM]
            raise ValueError(f"{_OF_SLURM}={text!r}: granularity='node' needs as many ranks on every node")
        return _possible(_OF_SLURM, environment[_OF_SLURM], counts.pop(), world_size)
    import torch

    gpus = torch.cuda.device_count()
    if gpus or world_size == 1:
        return gpus or 1
    names = ", ".join((*_LOCAL_SIZES, _OF_SLURM))
    raise ValueError(
        f"granularity='node' needs the number of ranks per node: none of {names} is set, and there is no GPU. "
        "Set LOCAL_WORLD_SIZE, or granularity='rank'"
    )


def _possible(name: str, text: str, count: str, world_size: int) -> int:
    """Returns `count` as a number of ranks per node.

    Raises:
        ValueError: it is no number from 1 to `world_size`; names the variable and its whole text.
    """
    if count.strip().isdecimal():
        number = int(count)
    else:
        number = 0
    if not 1 <= number <= world_size:
        raise ValueError(f"{name}={text!r} is not a number of ranks between 1 and WORLD_SIZE={world_size}")
    return number
