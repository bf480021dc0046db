"""A rank of a real DDP training (gloo), with the faults of its plan, each once.

All its numbers are whole or halves: results are exact.

Rank 0 saves after every step; all resume from there. The weight goes down by the mean of the ranks' samples.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ft_client as ft
from tests.faults.injected import FAULTS, no_core_files
from tests.faults.training import DDP_STEPS, Plan
from tests.faults.worker import write
from tests.groups import end_groups


def main(folder: Path) -> None:
    """Trains to the end, from the last checkpoint on."""
    no_core_files()
    plan, state = Plan.load(folder), folder / "ddp"
    client = ft.RankMonitorClient()
    client.init_workload_monitoring()
    with client.section("setup"):
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        done, weight = (float(word) for word in state.read_text().split()) if state.exists() else (0.0, 0.0)
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.constant_(model.weight, weight)
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    for step in range(int(done), DDP_STEPS):
        client.report_iteration(step)
        with client.section("step"):
            for index, fault in enumerate(plan.faults):
                marker = folder / f"injected-{index}"
                if fault.iteration == step and fault.rank == rank and not marker.exists():
                    marker.touch()
                    FAULTS[fault.what](client)
            optimizer.zero_grad()
            ddp(torch.tensor([[float(step * world + rank)]], dtype=torch.float64)).sum().backward()
            optimizer.step()
        with client.section("checkpointing"):
            if rank == 0:
                write(state, f"{step + 1} {model.weight.item()}")
            dist.barrier()
    del ddp, optimizer  # it would be the group's last owner, and torch may then wait for ever for the group's thread
    end_groups()
    client.shutdown_workload_monitoring()


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main(Path(sys.argv[1]))
