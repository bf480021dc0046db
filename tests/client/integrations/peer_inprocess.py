"""A training that restarts in process, written against the documented API of `nvidia_resiliency_ext.inprocess`.

Model and store live in the process, groups in one call of the function. Rank 1 raises in the first call, in the second
a fault of the peer's own tools happens in it, and the third comes to the end. Each rank writes down what it saw.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Optional

import torch
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.shared_utils import inject_fault as tools

STEPS, SAVE_EVERY, FAULT_STEP = 12, 3, 7
seen: dict[str, list[object]] = {"initialize": [], "finalize": [], "iterations": [], "faults": []}


class Note(inprocess.initialize.Initialize):
    """Writes down each start."""

    def __call__(self, state: inprocess.state.FrozenState) -> inprocess.state.FrozenState:
        seen["initialize"].append([state.iteration, state.mode.name])
        return state


class AbortLoader(inprocess.abort.Abort):
    """Would stop what other threads of the training wait for."""

    def __call__(self, state: inprocess.state.FrozenState) -> inprocess.state.FrozenState:
        return state


def clean_up() -> None:
    seen["finalize"].append(torch.distributed.is_initialized())


@inprocess.Wrapper(
    store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 2},
    initialize=inprocess.Compose(
        Note(),
        inprocess.initialize.RetryController(max_iterations=5, min_world_size=2),
        inprocess.nested_restarter.NestedRestarterHandlingCompleted(),
    ),
    abort=inprocess.Compose(
        inprocess.abort.AbortTransformerEngine(),
        inprocess.abort.AbortTorchDistributed(),
        AbortLoader(),
        inprocess.nested_restarter.NestedRestarterHandlingStarting(),
    ),
    finalize=inprocess.finalize.ThreadedFinalize(timeout=datetime.timedelta(seconds=10), fn=clean_up),
    health_check=inprocess.Compose(
        inprocess.health_check.CudaHealthCheck(timeout=datetime.timedelta(seconds=20)),
        inprocess.health_check.FaultCounter(max_rank_faults=4),
    ),
    completion=inprocess.nested_restarter.NestedRestarterFinalized(),
    terminate=inprocess.nested_restarter.NestedRestarterAborted(),
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.ActiveWorldSizeDivisibleBy(1),
        inprocess.rank_assignment.MaxActiveWorldSize(2),
        inprocess.rank_assignment.ShiftRanks(),
        inprocess.rank_assignment.FilterCountGroupedByKey(
            key_or_fn=lambda state: state.rank // 2,
            condition=lambda count: count == 2,
            timeout=datetime.timedelta(seconds=30),
        ),
    ),
    monitor_thread_interval=datetime.timedelta(seconds=0.5),
    monitor_process_interval=datetime.timedelta(seconds=0.5),
    last_call_wait=datetime.timedelta(seconds=0.1),
    soft_timeout=datetime.timedelta(seconds=30),
    hard_timeout=datetime.timedelta(seconds=60),
    heartbeat_timeout=datetime.timedelta(seconds=60),
    completion_timeout=datetime.timedelta(seconds=90),
)
def train(
    base_store: torch.distributed.Store,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    call_wrapper: Optional[inprocess.CallWrapper] = None,  # noqa: UP045
) -> int:
    assert call_wrapper is not None
    rank, iteration = int(os.environ["RANK"]), call_wrapper.iteration
    seen["iterations"].append(iteration)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.PrefixStore(str(iteration), base_store),
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=60),
    )
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    file, first = folder / "checkpoint.pt", 0
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        first = saved["step"]
    for step in range(first, STEPS):
        if step and step % SAVE_EVERY == 0:
            torch.distributed.barrier()
            if rank == 0:
                with call_wrapper.atomic():
                    torch.save({"model": model.state_dict(), "step": step}, file)
        if step == FAULT_STEP:
            break_something(iteration, rank)
        optimizer.zero_grad()
        ddp(torch.full((1, 1), float(step))).sum().backward()
        optimizer.step()
        call_wrapper.ping()
    del ddp  # it would be the group's last owner, and torch may then wait for ever for the group's thread
    torch.distributed.destroy_process_group()
    return STEPS - first


def break_something(iteration: int, rank: int) -> None:
    if iteration == 0 and rank == 1:
        raise RuntimeError(f"a fault in {iteration=} of {rank=}")
    if iteration == 1:
        tools.clear_workload_exception()
        tools.inject_fault(
            faults=(tools.Fault.WORKLOAD_EXC,),
            num_faults=(1, 1),
            keep_alive=1,
            delay=(0.05, 0.1),
            seed=2024,
            callback=lambda: seen["faults"].append(rank),
        )
        while True:
            tools.maybe_raise_workload_exception()
            time.sleep(0.01)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    base_store = torch.distributed.TCPStore(
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]) + 1,
        world_size=int(os.environ["WORLD_SIZE"]),
        is_master=int(os.environ["RANK"]) == 0,
        multi_tenant=True,
        wait_for_workers=True,
        use_libuv=True,
    )
    made = train(base_store, model, optimizer, folder)
    told = {**seen, "steps": made, "weight": model.weight.item()}
    (folder / f"seen-{os.environ['RANK']}").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
