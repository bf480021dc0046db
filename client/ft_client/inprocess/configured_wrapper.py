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


def configured_wrapper(
    config: InProcessRestartConfig, environment: Mapping[str, str], more: Mapping[str, Any]
) -> Wrapper:
    """The wrapper of one rank.

    Args:
        config: the options.
        environment: of the rank.
        more: further arguments of the wrapper. A callback is called before the one that the options ask for.

    Raises:
        TypeError, ValueError: as `InProcessRestartConfig.timeouts` and `Wrapper`; RANK or WORLD_SIZE is missing.
    """
    durations = asdict(config.timeouts())
    if not config.enabled:
        return Wrapper(**{**durations, **more, "enabled": False})
    state = State.from_env(environment)
    active = config.active_world_size or state.world_size
    callbacks = _callbacks(config, active)
    assignment = Tree(_layers(config, environment, active))
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


def _layers(config: InProcessRestartConfig, environment: Mapping[str, str], active: int) -> list[Layer]:
    """All ranks; and below them the nodes, each of which is given up as a whole."""
    layers = [Layer(min_ranks=active, max_ranks=active, flag=LayerFlag.RESERVE)]
    if config.granularity == "node":
        per_node = torch.cuda.device_count() or int(environment.get("LOCAL_WORLD_SIZE", "1"))
        node = socket.gethostname()
        layers.append(Layer(min_ranks=per_node, max_ranks=per_node, key_or_fn=node, flag=LayerFlag.RESERVE))
    return layers
