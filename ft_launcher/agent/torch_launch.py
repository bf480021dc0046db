"""Runs torch's agent of this node for one job, as torch's `launch_agent` does, but with our agent and our rendezvous.

Called by `composition.py`, in the launcher's main thread. torch's own function cannot be used: it makes the rendezvous
handler and the agent itself, and has no hook for either. A `LaunchConfig` is passed on by the names of its fields, so
that a field which a later release of torch adds arrives as well. Uses torch's underscored `_get_entrypoint_name`.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig, _get_entrypoint_name

_torch_log = logging.getLogger("torch.distributed.launcher.api")
"""The logger of torch's own launcher: `LOGLEVEL=INFO` shows what it says, as under torchrun."""

Entrypoint: TypeAlias = "Callable[..., Any] | str"

_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""torchrun sets it for itself, and its ranks inherit it."""
_NO_EVENTS = "null"
"""torch's default for the handler of events, before its configuration had one."""


def worker_spec(
    config: LaunchConfig, entrypoint: Entrypoint, args: Sequence[Any], handler: RendezvousHandler
) -> WorkerSpec:
    """Returns torch's specification of the ranks of this node. `composition.py` makes the agent of it.

    Args:
        config: torch's configuration of the job.
        entrypoint: the function or the program that each rank runs.
        args: its arguments.
        handler: the rendezvous.
    """
    same = _of_config(config, {field.name for field in fields(WorkerSpec)})
    return WorkerSpec(
        local_world_size=config.nproc_per_node, entrypoint=entrypoint, args=tuple(args), rdzv_handler=handler, **same
    )


def agent_arguments(config: LaunchConfig) -> dict[str, Any]:
    """Returns what torch's agent takes of a configuration beside the specification of the ranks: logs, prefixes of
    lines, the method by which processes start."""
    return _of_config(config, inspect.signature(LocalElasticAgent.__init__).parameters)


def _of_config(config: LaunchConfig, names: Collection[str]) -> dict[str, Any]:
    """Returns those fields of a configuration that have one of these names."""
    return {field.name: getattr(config, field.name) for field in fields(LaunchConfig) if field.name in names}


def run_agent(agent: SimpleElasticAgent, config: LaunchConfig) -> Mapping[int, Any]:
    """Runs an agent until the job has ended on this node, and records torch's events of the end. Blocks until then.

    Returns:
        Global rank -> what the function of this rank returned; None for a rank that is a program.

    Raises:
        ChildFailedError: torch's; ranks failed, and the job is given up.
        SignalException: torch's; a signal ended the launcher.
    """
    if hasattr(config, "signals_to_handle"):
        # As under torchrun: the ranks have this variable in their environment.
        os.environ[_SIGNALS_VARIABLE] = config.signals_to_handle
    spec = agent.get_worker_group().spec
    entrypoint = _get_entrypoint_name(spec.entrypoint, list(spec.args))
    _torch_log.info("the configuration of this node:\n%s", _as_lines(config, entrypoint))
    metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
    result = _run(agent, spec.rdzv_handler, getattr(config, "event_log_handler", _NO_EVENTS))
    if result.is_failed():
        raise ChildFailedError(entrypoint, result.failures)
    values: Mapping[int, Any] = result.return_values
    return values


def _as_lines(config: LaunchConfig, entrypoint: str) -> str:
    """Returns a configuration in lines of a name and a value each, which people look for in logs of torchrun too."""
    named = {field.name: getattr(config, field.name) for field in fields(LaunchConfig) if field.name != "logs_specs"}
    return "".join(f"  {name:<24} : {value}\n" for name, value in {"entrypoint": entrypoint, **named}.items())


def _run(agent: SimpleElasticAgent, handler: RendezvousHandler, event_handler: str) -> RunResult:
    """Runs the agent, then closes the rendezvous. A signal to this launcher leaves it open for the other nodes.

    Args:
        agent: of this node.
        handler: its rendezvous.
        event_handler: the name of torch's handler that gets the event of the end.
    """
    stays_open = False
    try:
        result = agent.run()
        # The event says that the agent ran to its end, whatever became of the ranks.
        events.record(agent.get_event_succeeded(), event_handler)
    except SignalException:
        stays_open = True
        events.record(agent.get_event_failed(), event_handler)
        raise
    except Exception:
        events.record(agent.get_event_failed(), event_handler)
        raise
    finally:
        if not stays_open:
            handler.shutdown()
    return result
