"""A rank that restarts in process, as a task of srun: FOLDER FAULTY...

In the nth attempt the nth of FAULTY dies, in the first iteration, and the others go on without it; or `all` die.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ft_client.inprocess import CallWrapper, Wrapper


def train(faulty: str, call: CallWrapper) -> None:
    """A few sums over all ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    print(f"iteration {call.iteration} rank {rank} of {world} on {os.environ['SLURMD_NODENAME']}", flush=True)
    # One tensor, which outlives the group: with torch 2.6 the group's end can hang if gloo has to free it.
    total = torch.tensor(0)
    for step in range(20):
        total.fill_(1)
        dist.all_reduce(total)
        assert total.item() == world
        is_faulty = faulty == str(call.state.initial_rank) and call.iteration == 0
        if step == 10 and (is_faulty or faulty == "all"):
            os.kill(os.getpid(), signal.SIGKILL)
        call.ping()
    if rank == 0:
        Path(os.environ["FAULT_TOL_FINISHED_FLAG_FILE"]).touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    Wrapper(
        monitor_process_logfile=os.environ["MONITOR_LOG"],
        soft_timeout=timedelta(seconds=30),
        hard_timeout=timedelta(seconds=45),
        barrier_timeout=timedelta(seconds=60),
        last_call_wait=timedelta(milliseconds=10),
    )(train)(sys.argv[2 + int(os.environ.get("SLURM_RESTART_COUNT", "0"))])
