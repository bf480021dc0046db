"""A rank that meets its peer over gloo and then dies of SIGKILL, in turn with it, until the last cycle."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

from tests.groups import end_groups

CRASHES = 100

if __name__ == "__main__":
    dist.init_process_group("gloo")
    cycle, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
    total = torch.ones(1)
    dist.all_reduce(total)
    if total.item() != dist.get_world_size():
        sys.exit(9)
    if cycle < CRASHES and cycle % 2 == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    end_groups()
