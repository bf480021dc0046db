"""The wrapper that Megatron Bridge's options describe. Knows the callbacks there are, and nothing of how they work."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ft_client.inprocess.abort import AbortTorchDistributed, AbortTransformerEngine
from ft_client.inprocess.compose import Compose
from ft_client.inprocess.finalize import ThreadedFinalize
from ft_client.inprocess.health_check import CudaHealthCheck, FaultCounter
from ft_client.inprocess.initialize import RetryController
from ft_client.inprocess.layer import Layer, LayerFlag
from ft_client.inprocess.nested_restarter import (
    NestedRestarterAborted,
    NestedRestarterFinalized,
    NestedRestarterHandlingCompleted,
    NestedRestarterHandlingStarting,
)
from ft_client.inprocess.restart_config import InProcessRestartConfig, logfile_name
from ft_client.inprocess.state import State
from ft_client.inprocess.tree import Tree
from ft_client.inprocess.wrapper import Wrapper

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


def configured_wrapper(
    config: InProcessRestartConfig, environment: Mapping[str, str], more: Mapping[str, Any]
) -> Wrapper:
    """The wrapper of one rank.

    Args:
        config: the options.
        environment: of the rank.
        more: further arguments of the wrapper. A callback is called before the one that the options ask for.

    Raises:
        TypeError, ValueError: as `InProcessRestartConfig.timeouts` and `Wrapper`; RANK or WORLD_SIZE is missing; or,
            with granularity `node`, nothing says how many ranks a node has.
    """
    durations = asdict(config.timeouts())
    if not config.enabled:
        return Wrapper(**{**durations, **more, "enabled": False})
    state = State.from_env(environment)
    active = config.active_world_size or state.world_size
    callbacks = _callbacks(config, active)
    assignment = Tree(_layers(config, environment, active, state.world_size))
    arguments: dict[str, Any] = {**durations, **callbacks, "rank_assignment": assignment}
    if config.monitor_process_logdir is not None and state.rank == 0:
        name = logfile_name(environment, socket.gethostname())
        arguments["monitor_process_logfile"] = str(Path(config.monitor_process_logdir, name))
    for name, given in more.items():
        arguments[name] = Compose(callbacks[name], given) if name in callbacks and given is not None else given
    return Wrapper(**arguments)


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
    if (gpus := torch.cuda.device_count()) or world_size == 1:
        return gpus or 1
    names = ", ".join((*_LOCAL_SIZES, _OF_SLURM))
    raise ValueError(
        f"granularity='node' needs the number of ranks per node: none of {names} is set, and there is no GPU. "
        "Set LOCAL_WORLD_SIZE, or granularity='rank'"
    )


def _possible(name: str, text: str, count: str, world_size: int) -> int:
    number = int(count) if count.strip().isdecimal() else 0
    if not 1 <= number <= world_size:
        raise ValueError(f"{name}={text!r} is not a number of ranks between 1 and WORLD_SIZE={world_size}")
    return number
