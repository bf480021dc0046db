"""State in memory: FSDP2 on CPU, whose ranks are killed twice, and which goes on from the step that was saved last.

    ft_launcher --nproc-per-node=2 --max-restarts=2 scripts/examples/memory_checkpoint.py

Rank 1 is killed by SIGKILL after step 45, and later both ranks after step 80. Each of them says so before, and rank 0
says from which step the training goes on: what lies between is lost. How much that is depends on the machine, since the
launcher chooses how often to save (`--ft-memory-interval auto`). No checkpoint is on disk: the state lies in files of
the launcher in /dev/shm. At the end the ranks train once more, without faults and without that state, and compare the
weights bit for bit. FSDP2 of torch 2.6 does not run on a CPU: this needs a later release.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ft_client as ft

STEPS = 100
WIDTH = 64
KILLED = {0: (45, (1,)), 1: (80, (0, 1))}
"""Cycle -> after which step which ranks are killed."""


def train(keep_state: bool) -> list[torch.Tensor]:
    """Trains, and returns the weights of this rank."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1)
    )
    for layer in (model[0], model[3]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    torch.manual_seed(dist.get_rank())  # each rank has its own data

    start = 0
    if keep_state:
        keep = ft.MemoryCheckpoint(model=model, optimizer=optimizer, scheduler=scheduler)
        start = keep.load()
        say(f"begins after step {start}")
    for step in range(start, STEPS):
        data = torch.randn(32, WIDTH)
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if keep_state:
            keep.step(step + 1)
            be_killed(step + 1)
    return [parameter.to_local().detach().clone() for parameter in model.parameters()]


def be_killed(step: int) -> None:
    """Kills this process where it is its turn."""
    at, ranks = KILLED.get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), (0, ()))
    if step == at and dist.get_rank() in ranks:
        say(f"is killed after step {step}")
        os.kill(os.getpid(), signal.SIGKILL)


def say(text: str) -> None:
    """Prints a line with the number of this rank."""
    print(f"rank {dist.get_rank()}: {text}", flush=True)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    dist.init_process_group("gloo")
    kept = train(keep_state=True)
    undisturbed = train(keep_state=False)
    same = all(torch.equal(one, other) for one, other in zip(kept, undisturbed, strict=True))
    say(f"the weights are {'the same, bit for bit' if same else 'DIFFERENT'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
