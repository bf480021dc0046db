"""Every option of Megatron Bridge reaches the wrapper that is built from them, and the wrapper works."""

from __future__ import annotations

import datetime
import socket
from typing import Any

import pytest

from ft_client.inprocess import nested_restarter
from ft_client.inprocess.abort import AbortTorchDistributed
from ft_client.inprocess.assignment.topology import LayerFlag
from ft_client.inprocess.finalize import ThreadedFinalize
from ft_client.inprocess.health_check import FaultCounter
from ft_client.inprocess.initialize import RetryController
from ft_client.inprocess.rank_assignment import Tree
from ft_client.inprocess.restart_config import InProcessRestartConfig
from tests.client.inprocess import corner_mains
from tests.client.inprocess.job import job

RANK_0 = {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "SLURM_JOB_ID": "7"}


def arguments_of(environment: dict[str, str] = RANK_0, more: dict[str, Any] | None = None, **options: Any) -> Any:
    return InProcessRestartConfig(enabled=True, **options).wrapper(environment, **(more or {})).arguments


def parts(callback: Any) -> dict[type, Any]:
    return {type(one): one for one in getattr(callback, "instances", (callback,))}


def test_not_enabled_it_wraps_nothing() -> None:
    def function() -> None: ...

    assert InProcessRestartConfig().wrapper({})(function) is function


@pytest.mark.parametrize(
    "name",
    [
        *("soft_timeout", "hard_timeout", "heartbeat_interval", "heartbeat_timeout", "monitor_thread_interval"),
        *("monitor_process_interval", "progress_watchdog_interval", "barrier_timeout", "completion_timeout"),
        *("last_call_wait", "termination_grace_time"),
    ],
)
def test_durations(name: str) -> None:
    value = getattr(InProcessRestartConfig(), name) + 0.25
    assert getattr(arguments_of(**{name: value}), name) == datetime.timedelta(seconds=value)


def test_limits() -> None:
    made = arguments_of(active_world_size=12, max_iterations=5, max_rank_faults=2)
    retry = parts(made.initialize)[RetryController]
    assert (retry.max_iterations, retry.min_world_size) == (5, 12)
    assert parts(made.health_check)[FaultCounter].max_rank_faults == 2
    assert parts(arguments_of().initialize)[RetryController].min_world_size == 16


def test_granularity(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = arguments_of(active_world_size=8, granularity="rank").rank_assignment
    assert isinstance(tree, Tree)
    assert [(one.min_ranks, one.max_ranks) for one in tree.layers] == [(8, 8)]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    layers = arguments_of(active_world_size=8).rank_assignment.layers
    assert [(one.min_ranks, one.max_ranks, one.flag) for one in layers] == [(8, 8, LayerFlag.RESERVE)] * 2
    assert layers[1].key_or_fn == socket.gethostname()


def test_the_cache_is_emptied_unless_not_wanted() -> None:
    import torch

    finalize = arguments_of().finalize
    assert isinstance(finalize, ThreadedFinalize) and finalize.fn is torch.cuda.empty_cache
    assert arguments_of(empty_cuda_cache=False).finalize is None


def test_the_log_is_of_rank_0_only() -> None:
    name = f"/logs/monitor_7_{socket.gethostname()}_none_none.log"
    assert arguments_of(monitor_process_logdir="/logs").monitor_process_logfile == name
    assert arguments_of({**RANK_0, "RANK": "1"}, monitor_process_logdir="/logs").monitor_process_logfile is None


def test_the_launcher_is_told() -> None:
    made = arguments_of()
    assert AbortTorchDistributed in parts(made.abort)
    assert made.abort.instances[-1].__class__ is nested_restarter.NestedRestarterHandlingStarting
    assert isinstance(made.completion, nested_restarter.NestedRestarterFinalized)
    assert isinstance(made.terminate, nested_restarter.NestedRestarterAborted)


def test_more_arguments() -> None:
    def mine(state: Any) -> Any:
        return state

    made = arguments_of(more={"finalize": mine, "completion": None, "store_kwargs": {"port": 5}})
    assert made.finalize.instances[-1] is mine
    assert ThreadedFinalize in parts(made.finalize)
    assert (made.completion, made.store_kwargs) == (None, {"port": 5})
    with pytest.raises(TypeError, match="finalise"):
        arguments_of(more={"finalise": mine})


def test_ranks_with_it() -> None:
    """One of three ranks exits, and the spare takes its place; when another does, too few are left."""
    with job(3, corner_mains.as_configured, active=2, exits=1) as made:
        told = made.end()
    assert sorted(told[rank].result for rank in (1, 2)) == [(0, 2, 1), (1, 2, 1)]
    with job(3, corner_mains.as_configured, active=2, exits=2) as made:
        told = made.end()
    assert sum(one.error.startswith("SystemExit") for one in told.values()) == 2
    assert sum(one.error.startswith("RankDiscarded") for one in told.values()) == 1


def test_every_task_of_srun_takes_part_or_none() -> None:
    """Not half of the world, without a word, where torchrun's LOCAL_WORLD_SIZE is missing."""
    with job(2, corner_mains.by_srun, tasks="2") as made:
        told = made.end()
    assert [told[rank].result for rank in range(2)] == [(0, 2), (1, 2)]
    with job(2, corner_mains.by_srun, tasks=None) as made:
        told = made.end()
    assert all("needs the number of ranks per node" in told[rank].error for rank in range(2))


@pytest.mark.parametrize(
    ("environment", "gpus", "per_node"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_STEP_TASKS_PER_NODE": "1"}, 8, 2),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 0, 4),
        ({"MPI_LOCALNRANKS": "4"}, 0, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x4)"}, 1, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,4(x3)"}, 0, 4),
        ({}, 8, 8),
        ({"WORLD_SIZE": "1"}, 0, 1),
    ],
)
def test_ranks_per_node(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], gpus: int, per_node: int) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    layers = arguments_of({"RANK": "0", "WORLD_SIZE": "16", **environment}).rank_assignment.layers
    assert (layers[1].min_ranks, layers[1].max_ranks) == (per_node, per_node)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "needs the number of ranks per node: none of LOCAL_WORLD_SIZE, "),
        ({"LOCAL_WORLD_SIZE": "many"}, "LOCAL_WORLD_SIZE='many' is not a number of ranks between 1 and WORLD_SIZE=16"),
        ({"LOCAL_WORLD_SIZE": "17"}, "LOCAL_WORLD_SIZE='17' is not"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x3),3"}, "needs as many ranks on every node"),
    ],
)
def test_ranks_per_node_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ValueError, match=words):
        arguments_of({"RANK": "0", "WORLD_SIZE": "16", **environment})
