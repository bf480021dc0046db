"""A rank of a pipeline in which ranks send and receive unequally often, all in one group. Run as a script.

`uneven_worker.py FOLDER`: the file `hang` in the folder has the rank that sleeps in its third step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ft_client as ft

FAULTY_STEP, STEPS = 2, 4


def main(faulty: int) -> None:
    """Passes something on along the ranks, then reduces, step by step."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(4))
    dist.monitored_barrier()  # in which rank 0 sends and receives more than the others
    ft.init()
    for step in range(STEPS):
        with ft.section("step"):
            ft.report_iteration(step)
            passed = torch.ones(4)
            if rank > 0:
                dist.recv(passed, rank - 1)
            if rank + 1 < world:
                dist.send(passed, rank + 1)
            if step == FAULTY_STEP and rank == faulty:
                time.sleep(600)
            dist.all_reduce(passed)
    ft.shutdown()


if __name__ == "__main__":
    main(int(Path(sys.argv[1], "hang").read_text()))
