"""What the ranks of `test_memory_checkpoint.py` run: a small training whose state lies in memory.

Its result depends on the parameters, on Adam's moments, and on random numbers of each rank: it is the same as without
faults only if all of these were kept.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ft_client as ft
from rank_monitor.contract import env

WIDTH = 32


def made(kind: str) -> Any:
    """A model of the kind: `ddp`, `fsdp`, `hsdp` or `tp`."""
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    )
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        for layer in (model[0], model[3]):
            fully_shard(layer)
        return fully_shard(model)
    from torch.distributed.device_mesh import init_device_mesh

    if kind == "hsdp":
        return fully_shard(
            model, mesh=init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("a", "b"))
        )
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})


def weights(model: Any) -> list[float]:
    """All parameters, whole."""
    found = []
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found += whole.detach().flatten().tolist()
    return found


def main() -> None:
    plan = json.loads((Path(sys.argv[1]) / "plan.json").read_text())
    folder = Path(plan["folder"])
    dist.init_process_group("gloo")
    rank, cycle = dist.get_rank(), int(os.environ[env.CYCLE])
    torch.manual_seed(1 if plan["kind"] in ("ddp", "fsdp", "hsdp", "tp") else rank)
    model = made(plan["kind"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
    torch.manual_seed(1 if plan["kind"] == "tp" else 100 + rank)
    keep = ft.MemoryCheckpoint(model=model, optimizer=optimizer, schedule=schedule)
    start = keep.load(newer_than=plan.get("newer_than", 0))
    with (folder / f"starts-{rank}").open("a") as file:
        file.write(f"{cycle} {start}\n")
    for step in range(start, plan["steps"]):
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        schedule.step()
        keep.step(step + 1)
        (folder / f"step-{cycle}-{rank}").write_text(f"{step + 1} {keep.failures}")
        victims = plan.get("kills", {}).get(f"{cycle} {step + 1}", [])
        if rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"weights-{rank}").write_text(json.dumps(weights(model)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
