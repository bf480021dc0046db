"""The training that the pictures of the status page show. `page_pictures.py` runs it.

In the first cycle rank `HANGS` never comes out of a checkpoint. Later cycles train until they are ended.
"""

from __future__ import annotations

import itertools
import os
import signal
import time

import torch
import torch.distributed as dist

import ft_client as ft

HANGS = 5
STEP_S = 0.1
SYNCHRONISED = 10
"""Steps from one collective to the next: the rank that hangs is some steps behind the others."""
SAVED = 40
"""Steps from one checkpoint to the next."""


def main() -> None:
    """Trains. A rank that is told to end goes on, so that one that hangs stays on the page until it is killed."""
    dist.init_process_group("gloo")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank, is_first_cycle = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    first = 0
    if not is_first_cycle:
        first = SAVED
    ft.init()
    for step in ft.steps(itertools.count(first + 1), start=first + 1):
        train_step()
        if step % SYNCHRONISED == 0:
            synchronise()
        if step % SAVED == 0:
            save(hangs=is_first_cycle and rank == HANGS)


def train_step() -> None:
    """Takes as long as a step does."""
    time.sleep(STEP_S)


def synchronise() -> None:
    """A collective of all ranks."""
    dist.all_reduce(torch.ones(1024, 16))


def save(hangs: bool) -> None:
    """A checkpoint."""
    with ft.section("checkpointing"):
        time.sleep(STEP_S)
        while hangs:
            wait_for_storage()


def wait_for_storage() -> None:
    """Storage does not answer."""
    time.sleep(3600)


if __name__ == "__main__":
    main()
