"""A rank of a training of which the last rank returns before the others are done. Run as a script.

The others go on when its launcher has seen its end, and then lose their connection to it in a collective.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

AFTER_S = 0.2 * float(os.environ.get("FT_TEST_PATIENCE", "1"))
"""For the way of its exit code to the launcher of its node, once its process is gone."""


def main() -> None:
    """Trains for one step, and the others for two."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    processes = torch.zeros(world, dtype=torch.int64)
    processes[rank] = os.getpid()
    dist.all_reduce(processes)
    if rank == world - 1:
        return
    while Path(f"/proc/{int(processes[-1])}").exists():
        time.sleep(0.01)
    time.sleep(AFTER_S)
    dist.all_reduce(processes)


if __name__ == "__main__":
    main()
