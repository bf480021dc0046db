"""What ranks of `test_megatron_core.py` run: Megatron Core as it is installed, with the calls that Megatron-LM makes
for `--non-persistent-ckpt-type local`. Nothing of ours is imported: FT_ALIAS_NVRX stands in the environment.

The arguments: the rank, a file for the process group, the user's folder, and the name of a function, `all_of_it`. The
result is printed as JSON.

Core names CUDA also where tensors lie on the host: `cpu_stands_for_cuda` changes torch for that, not Core.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Makes and moves tensors on the host where a program says CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if torch.device(named.get("device") or "cpu").type == "cuda":
            named["device"] = "cpu"
        return func(*args, **named)


@contextmanager
def cpu_stands_for_cuda() -> Iterator[None]:
    """While the context lasts, here and in forked processes. Core's persistent worker is forked then, not spawned."""
    get_context = torch.multiprocessing.get_context
    with (
        mock.patch("torch.multiprocessing.get_context", lambda method: get_context("fork")),
        mock.patch("torch.cuda.current_device", lambda: "cpu"),
        mock.patch("torch.cuda.device_count", lambda: 1),
        mock.patch("torch.cuda.set_device", lambda device: None),
        mock.patch("torch.cuda.synchronize", lambda: None),
        OnCpu(),
    ):
        yield


def sharded(value: float) -> dict[str, Any]:
    """A state as Megatron makes it: tensors of all ranks, a shard and an object of each, and a plain value."""
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    rank, size = dist.get_rank(), dist.get_world_size()
    return {
        "whole": ShardedTensor.from_rank_offsets("whole", torch.full((4, 8), value), replica_id=rank),
        "second": ShardedTensor.from_rank_offsets("second", torch.full((5,), 2 * value), replica_id=rank),
        "shard": ShardedTensor.from_rank_offsets("shard", torch.full((3,), value + rank), (0, rank, size)),
        "rng": ShardedObject("rng", {"seed": value + rank}, (size,), (rank,)),
        "iteration": int(value),
    }


def values(state: dict[str, Any]) -> list[float]:
    tensors = [state[name] for name in ("whole", "second", "shard")]
    assert all(bool((tensor == tensor.flatten()[0]).all()) for tensor in tensors)
    return [*(float(tensor.flatten()[0]) for tensor in tensors), state["rng"]["seed"], state["iteration"]]


def train(user: Path, algo: str, queue: Any = None) -> Any:
    """Saves iterations 5 and 10, as `save_checkpoint` does; then loads as `load_checkpoint` of a new process does."""
    from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

    manager, cache = LocalCheckpointManager(user), None
    found = [manager.find_latest()]
    for iteration in (5, 10):
        to_save, cache = MCoreTensorAwareStateDict.from_state_dict(
            sharded(iteration), algo=algo, cached_metadata=cache, parallelization_group=dist.group.WORLD
        )
        request = manager.save(to_save, iteration, is_async=queue is not None)
        if queue is not None:
            request.add_finalize_fn(lambda: None)
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
    again = LocalCheckpointManager(user)
    found.append(again.find_latest())
    for _ in range(2):  # Megatron-LM reads twice: first what is common alone
        loaded, _ = again.load()
    state = loaded.to_state_dict(sharded(0), algo=algo, parallelization_group=dist.group.WORLD)
    return [*found, values(state)]


def queue_of(persistent: bool) -> Any:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    return AsyncCallsQueue(persistent=persistent)


def atomic(user: Path) -> Any:
    return train(user, "atomic")


def fully_parallel(user: Path) -> Any:
    return train(user, "fully_parallel")


def asynchronous(user: Path) -> Any:
    return train(user, "fully_parallel", queue_of(persistent=False))


def by_a_persistent_worker(user: Path) -> Any:
    queue = queue_of(persistent=True)
    try:
        return train(user, "atomic", queue)
    finally:
        queue.close()


def refused(user: Path) -> Any:
    """The job's queue gets the request of a save that does not fit, and does not hang. The program's function for a
    checkpoint that is there is not called."""
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

    queue = queue_of(persistent=True)
    try:
        manager, done = LocalCheckpointManager(user), []
        request = manager.save(BasicTensorAwareStateDict({"a": torch.ones(1 << 20)}), 5, is_async=True)
        request.add_finalize_fn(lambda: done.append("finalized"))
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        return [manager.failures, *done, manager.find_latest()]
    finally:
        queue.close()


def replicated(user: Path) -> Any:
    """As `pretrain` of Megatron-LM does for `--replication`."""
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

    strategy = CliqueReplicationStrategy.from_replication_params(1, 2)
    manager = LocalCheckpointManager(user, repl_strategy=strategy)
    manager.save(BasicTensorAwareStateDict({"a": torch.ones(1)}), 5)
    return manager.find_latest()


def all_of_it(user: Path) -> Any:
    ways = (atomic, fully_parallel, asynchronous, by_a_persistent_worker, refused, replicated)
    return {way.__name__: way(user / way.__name__) for way in ways}


def main() -> None:
    rank, store, user, what = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=60),
    )
    function: Callable[[Path], Any] = globals()[what]
    with cpu_stands_for_cuda():
        print(json.dumps(function(user)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
