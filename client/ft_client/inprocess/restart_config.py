"""In-process restart as Megatron Bridge configures it: plain numbers in seconds, and the wrapper that they describe.

Scripts make one and call `wrapper()`. Decides nothing itself: every callback and limit is one of the other files here.
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

# As in Megatron-LM (`inprocess_restart.py`), for the same two callbacks.
_CALLBACK_LIMIT = datetime.timedelta(seconds=10)
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
)
"""How many ranks this node has: torchrun's and ours, Open MPI's, MPICH's and Intel's, MVAPICH's, HPE's."""
_OF_SLURM = "SLURM_STEP_TASKS_PER_NODE"
"""The tasks of each node of a step in order, as `4(x2),3`."""
GRANULARITIES = ("node", "rank")


@dataclass(kw_only=True)
class InProcessRestartConfig:
    """Options of in-process restart. Durations are seconds. Can be changed until it is used, as Bridge's own can.

    `active_world_size`: ranks that call the function, None: all. `granularity`: what is given up with a rank, itself
    or its node. `max_iterations`: None: no limit. `empty_cuda_cache`: after a fault. `max_rank_faults`: faults of one
    rank before it ends, None: no limit. `monitor_process_logdir`: folder for the log of rank 0's monitor process.
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
        """The wrapper that these options describe.

        Args:
            environment: of the rank; None: of this process.
            **more: further arguments of `Wrapper`. A callback is called before that of the options.

        Raises:
            TypeError, ValueError: an option or argument cannot be; or, when enabled, RANK or WORLD_SIZE is missing.
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
        """The durations, checked against each other; all other options are checked, too.

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
    """The name of the log in `monitor_process_logdir`; what Slurm does not say reads `none`."""
    job, process, local = (environment.get(f"SLURM_{name}", "none") for name in ("JOB_ID", "PROCID", "LOCALID"))
    return f"monitor_{job}_{hostname}_{process}_{local}.log"


def _duration(name: str, value: object) -> datetime.timedelta:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not a number of seconds")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is not finite")
    return datetime.timedelta(seconds=value)


def _callbacks(config: InProcessRestartConfig, active: int) -> dict[str, Callable[..., Any]]:
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
    """All ranks; and below them the nodes, each of which is given up as a whole."""
    layers = [Layer(min_ranks=active, max_ranks=active, flag=LayerFlag.RESERVE)]
    if config.granularity == "node":
        per_node = _ranks_per_node(environment, world_size)
        node = socket.gethostname()
        layers.append(Layer(min_ranks=per_node, max_ranks=per_node, key_or_fn=node, flag=LayerFlag.RESERVE))
    return layers


def _ranks_per_node(environment: Mapping[str, str], world_size: int) -> int:
    """How many ranks each node has; the GPUs of this one where no launcher says it, as with Bridge.

    Raises:
        ValueError: nothing says it, so that ranks would become spares without a word; or what says it cannot be.
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
    if count.strip().isdecimal():
        number = int(count)
    else:
        number = 0
    if not 1 <= number <= world_size:
        raise ValueError(f"{name}={text!r} is not a number of ranks between 1 and WORLD_SIZE={world_size}")
    return number
