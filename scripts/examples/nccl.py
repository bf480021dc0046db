"""A training in which one rank never comes to a collective: the others give up at the timeout, and all start again.

    ft_launcher --nproc-per-node=2 --max-restarts=1 --ft-nccl-collective-timeout=10 scripts/examples/nccl.py

With gloo where there are not enough GPUs for NCCL: the timeout is that of every backend.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout


def train(absent_rank: int, steps: int, total: torch.Tensor) -> None:
    """Adds up the ranks, step by step; in the first cycle one rank is stuck before the second step."""
    rank, cycle = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    print(f"rank {rank}: waits in a collective for {default_pg_timeout.total_seconds():g} s", flush=True)
    for step in range(steps):
        if (rank, cycle, step) == (absent_rank, 0, 1):
            time.sleep(3600)  # in a driver, a file system, a lock
        total.fill_(rank)
        dist.all_reduce(total)
        print(f"rank {rank}: step {step}, {total.item():g}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--absent-rank", type=int, default=1, help="the rank that is stuck once; -1: none")
    parser.add_argument("--steps", type=int, default=3, help="how many")
    options = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    # It outlives the group: with torch 2.6 and gloo the group's end can hang if it has to free a tensor.
    total = torch.zeros(1, device=device)
    train(options.absent_rank, options.steps, total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
