"""A rank of a training with groups for data and tensor parallelism, in which one rank does not come. Run as a script.

`hang_worker.py FOLDER`: the file `hang` in the folder says what goes wrong, in which rank, and `mesh` where the groups
are those of a DeviceMesh: at its fourth step that rank does it. Each step begins with a send and a receive, as between
the stages of a pipeline. The first step is in no section, since it makes the connections.

With `wrapped=SECONDS` in that file the ranks are in an in-process wrapper of this `soft_timeout`, and the file
`told.RANK` gets why the function is called again, as it is told at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import ft_client as ft
from ft_client.inprocess import CallWrapper, Wrapper
from tests.faults.worker import write

FAULTY_STEP, STEPS = 3, 8
SLOW_S = 1.0
"""Longer than any step, and shorter than the limit."""


def load(kind: str) -> None:
    """Where the faulty rank is."""
    if kind == "sleeps":
        time.sleep(600)
    elif kind == "is slow":
        time.sleep(SLOW_S)
    elif kind == "holds the GIL":
        while True:
            ctypes.PyDLL(None).usleep(600_000_000)  # does not release it; the signal for the stacks interrupts the call
    elif kind == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "spins":
        while True:
            pass
    elif kind == "livelock":
        while True:
            torch.ones(4).sum()
            time.sleep(0.001)
    elif kind == "waits for a lock":
        lock = threading.Lock()
        with lock:
            lock.acquire()


def pass_on(rank: int, world: int, sends: bool = True) -> None:
    """Sends to the next rank, and receives from the one before, as the stages of a pipeline do: in `work.wait()`, which
    torch's flight recorder does not know with gloo, and which leaves no frame in a stack."""
    received = torch.zeros(4)
    works = [dist.irecv(received, (rank - 1) % world)]
    if sends:
        works.append(dist.isend(torch.ones(4), (rank + 1) % world))
    for work in works:
        work.wait()


def groups_of(rank: int, world: int, by_mesh: bool) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Returns the groups of this rank for tensor and for data parallelism: of neighbours, and of every second rank."""
    if by_mesh:
        mesh = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        return mesh.get_group("tp"), mesh.get_group("dp")
    pairs = [dist.new_group([first, first + 1], group_desc=f"tp{first}") for first in range(0, world, 2)]
    sides = [dist.new_group(list(range(side, world, 2)), group_desc=f"dp{side}") for side in range(2)]
    return pairs[rank // 2], sides[rank % 2]


def main(kind: str, faulty: int, by_mesh: bool, call: CallWrapper | None = None) -> None:
    """Trains until the step in which nothing goes on."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor_parallel, data_parallel = groups_of(rank, world, by_mesh)
    if call is None:
        ft.init()
    for step in range(STEPS):
        is_faulty = step == FAULTY_STEP and rank == faulty
        if is_faulty and kind == "sleeps outside":
            time.sleep(600)  # in no section, so that no limit of its own passes
        if is_faulty and kind == "returns early":
            break
        section = ft.section("step") if step and call is None else contextlib.nullcontext()
        with section:
            if call is None:
                ft.report_iteration(step)
            elif step:
                call.ping()
            if is_faulty:
                load(kind)
            pass_on(rank, world, sends=not (is_faulty and kind == "leaves out a send"))
            order = [data_parallel, tensor_parallel, None]  # None: all ranks
            if is_faulty and kind == "leaves one out":
                order.remove(data_parallel)
            elif is_faulty and kind == "one more":
                order.append(data_parallel)
            elif is_faulty and kind == "another order":
                order = [None, tensor_parallel, data_parallel]
            for group in order:
                if is_faulty and kind == "another collective" and group is data_parallel:
                    dist.broadcast(torch.ones(4), group=group, group_src=0)
                elif is_faulty and kind == "another size" and group is data_parallel:
                    dist.all_reduce(torch.ones(2), group=group)
                else:
                    dist.all_reduce(torch.ones(4), group=group)
    if call is None:
        ft.shutdown()


def wrapped(folder: Path, train: Callable[[CallWrapper], None], call: CallWrapper) -> None:
    """Trains, and when it is called again says why."""
    told = call.last_interruption
    if told is None:
        train(call)
    else:
        write(folder / f"told.{os.environ['RANK']}", json.dumps(asdict(told)))


if __name__ == "__main__":
    at = Path(sys.argv[1])
    what, who, *how = (at / "hang").read_text().split(":")
    train = partial(main, what, int(who), "mesh" in how)
    limits_s = [float(word.removeprefix("wrapped=")) for word in how if word.startswith("wrapped=")]
    if limits_s:
        soft = datetime.timedelta(seconds=limits_s[0])
        Wrapper(soft_timeout=soft, hard_timeout=3 * soft)(wrapped)(at, lambda call: train(call=call))
    else:
        train()
