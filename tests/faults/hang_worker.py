"""A rank of a training with groups for data and tensor parallelism, in which one rank does not come. Run as a script.

`hang_worker.py FOLDER`: the file `hang` in the folder names what goes wrong, and the rank: at its fourth step that rank
sleeps (also outside of the section), spins, holds the GIL, stops itself, leaves out a collective, calls one more, calls
another one, or calls those of two groups in another order. Each step begins with a send and a receive.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ft_client as ft

STRIKE, STEPS = 3, 8


def load(kind: str) -> None:
    """Where the faulty rank is."""
    if kind == "sleeps":
        time.sleep(600)
    elif kind == "holds the GIL":
        while True:
            ctypes.PyDLL(None).usleep(600_000_000)  # does not release it; the signal for the stacks interrupts the call
    elif kind == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "spins":
        while True:
            pass


def pass_on(rank: int, world: int) -> None:
    """Sends to the next rank, and receives from the one before, as the stages of a pipeline do: in `work.wait()`, which
    torch's flight recorder does not know with gloo, and which leaves no frame in a stack."""
    received = torch.zeros(4)
    works = [dist.irecv(received, (rank - 1) % world), dist.isend(torch.ones(4), (rank + 1) % world)]
    for work in works:
        work.wait()


def main(kind: str, faulty: int) -> None:
    """Trains until the step in which nothing goes on."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1], group_desc=f"tp{first}") for first in range(0, world, 2)]
    sides = [dist.new_group(list(range(side, world, 2)), group_desc=f"dp{side}") for side in range(2)]
    tensor_parallel, data_parallel = pairs[rank // 2], sides[rank % 2]
    ft.init()
    for step in range(STEPS):
        if kind == "sleeps outside" and step == STRIKE and rank == faulty:
            time.sleep(600)  # in no section, so that no limit of its own passes
        with ft.section("step"):
            ft.report_iteration(step)
            strikes = step == STRIKE and rank == faulty
            if strikes:
                load(kind)
            pass_on(rank, world)
            order = [data_parallel, tensor_parallel, None]  # None: all ranks
            if strikes and kind == "leaves one out":
                order.remove(data_parallel)
            elif strikes and kind == "one more":
                order.append(data_parallel)
            elif strikes and kind == "another order":
                order = [None, tensor_parallel, data_parallel]
            for group in order:
                if strikes and kind == "another collective" and group is data_parallel:
                    dist.broadcast(torch.ones(4), group=group, group_src=0)
                else:
                    dist.all_reduce(torch.ones(4), group=group)
    ft.shutdown()


if __name__ == "__main__":
    what, _, who = Path(sys.argv[1], "hang").read_text().partition(":")
    main(what, int(who))
