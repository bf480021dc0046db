"""A rank in an in-process wrapper, of which one holds up the others: what the function is told when it is called again.

`in_process_blame_worker.py FOLDER`: the file `hang` in the folder names the rank that sleeps, for each call until the
last. The higher half of the ranks shows a sign of life later than the others, which exceed their limit first. What each
rank is told goes to a file named by the call and its number.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from ft_client.inprocess import CallWrapper, Wrapper
from tests.client.inprocess.job import seconds
from tests.faults.worker import write
from tests.patience import patient

SOFT_S = 3.0
LIMIT_S = 30.0
LATER_S = 0.5
"""Longer than the monitors ask before the limit: of the later ranks nobody would be asked by their own monitors."""


def load() -> None:
    """Where the rank is that the others wait for."""
    time.sleep(600)


def train(call: CallWrapper, folder: Path, faulty: list[int]) -> None:
    """Says why it is called again, and hangs if one of its ranks is to."""
    rank = int(os.environ["RANK"])
    told = call.last_interruption
    deadline = time.monotonic() + patient(LIMIT_S)
    while told is not None and not told.ranks and time.monotonic() < deadline:  # the launcher says it a moment later
        time.sleep(0.01)
        told = call.last_interruption
    if told is not None:
        write(folder / f"told.{call.iteration}.{rank}", json.dumps(asdict(told)))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    for step in range(6):
        call.ping()
        if step == 3 - call.iteration and call.iteration < len(faulty):
            if rank >= dist.get_world_size() // 2:
                time.sleep(LATER_S)
                call.ping()
            if rank == faulty[call.iteration]:
                load()
        dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


if __name__ == "__main__":
    at = Path(sys.argv[-1])
    limits = {name: seconds(value) for name, value in {"soft_timeout": SOFT_S, "hard_timeout": 4 * SOFT_S}.items()}
    Wrapper(**limits)(train)(at, [int(rank) for rank in (at / "hang").read_text().split()])
