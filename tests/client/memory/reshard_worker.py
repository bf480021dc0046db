"""What each rank of a job of `test_reshard_load.py` runs.

Arguments: rank, number of ranks, a file for the process group, `ddp` or `fsdp`, and how many steps are done after
`load()`. The result is printed as JSON.
"""

from __future__ import annotations

import datetime
import json
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ft_client as ft
from ft_client.memory.background_work import BACKGROUND

WIDTH = 10
"""Neither four nor three ranks have shards of equal size."""


class Loader:
    """A place in the data."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.place, 1000))

    def state_dict(self) -> Any:
        return {"place": self.place}

    def load_state_dict(self, state: Any) -> None:
        self.place = state["place"]


def model_of(kind: str) -> Any:
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, 7), torch.nn.Tanh(), torch.nn.Linear(7, WIDTH, bias=False))
    if kind == "ddp":
        return DistributedDataParallel(layers)
    from torch.distributed.fsdp import fully_shard  # the other kind need not wait for it

    for layer in (layers[0], layers[2]):
        fully_shard(layer)
    fully_shard(layers)
    return layers


def checksum_of(model: Any, optimizer: Any) -> int:
    """A checksum of the whole weights and moments, whatever part of them this rank has."""
    found = 0
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for value in (parameter.detach(), *(state[key] for key in sorted(state))):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found = zlib.crc32(whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), found)
    return found


def main() -> None:
    rank, world, store, kind, steps = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
    )
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    loader = Loader()
    keep = ft.MemoryCheckpoint(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    start = keep.load()
    found = {
        "start": start,
        "world": keep.loaded_world,
        "loaded": checksum_of(model, optimizer),
        "rate": scheduler.get_last_lr(),
        "place": loader.place,
    }
    torch.manual_seed(100 + rank)
    for step in range(start, start + steps):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        loader.place += 1
        keep.step(step + 1)
        BACKGROUND.wait()
        dist.barrier()
    found |= {"saved": checksum_of(model, optimizer), "rate_then": scheduler.get_last_lr()}
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
