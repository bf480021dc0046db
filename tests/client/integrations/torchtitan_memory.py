"""A training with torchtitan's own optimizers, schedulers, loader and manager, and its state in memory:
`torchtitan_memory.py FOLDER`. The model is sharded by `fully_shard`.

FOLDER/training.json has: `kills` (cycle -> step and ranks), `disk` (steps between checkpoints on disk), `steps`,
`memory_interval` and `load_step`. Each rank writes its weights to FOLDER/end-RANK.json, and each step to FOLDER/seen.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from ft_client.integrations.torchtitan import MemoryCheckpointManager


class Numbers(IterableDataset):
    """Batches that depend on the rank and on how many came before, with a state of their own."""

    def __init__(self, rank: int) -> None:
        self.rank, self.done = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.done += 1
            yield torch.rand(4, generator=torch.Generator().manual_seed(1000 * self.rank + self.done))

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class Training:
    """What torchtitan's trainer is for its manager: it has a step, and a state with it."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self.step, self.plan = 0, plan
        rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (ranks,)))
        self.optimizers = default_adamw(0.01, implementation="for-loop").build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=5).build(
            optimizers=self.optimizers, training_steps=plan["steps"]
        )
        self.loader = ParallelAwareDataloader(Numbers(rank), dp_rank=rank, dp_world_size=ranks, batch_size=4)
        config = MemoryCheckpointManager.Config(
            enable=True,
            folder="disk",
            interval=plan["disk"],
            keep_latest_k=0,
            last_save_model_only=False,
            memory_interval=plan["memory_interval"],
        )
        self.manager = config.build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def run(self, seen: Path) -> None:
        self.manager.load(self.plan["load_step"])
        batches = iter(self.loader)
        cycle, rank = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), dist.get_rank()
        kill = self.plan["kills"].get(cycle)
        while self.step < self.plan["steps"]:
            with seen.open("a") as notes:
                notes.write(f"{cycle} {rank} {self.step}\n")
            if kill and self.step >= kill["step"] and rank in kill["ranks"]:
                os.kill(os.getpid(), signal.SIGKILL)
            self.step += 1
            self.optimizers.zero_grad()
            self.model(next(batches)).square().mean().backward()
            self.optimizers.step()
            self.schedulers.step()
            self.manager.save(self.step, last_step=self.step == self.plan["steps"])
        self.manager.close()


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    training = Training(folder, json.loads((folder / "training.json").read_text()))
    training.run(folder / "seen")
    weights = [value.to_local().tolist() for value in training.model.parameters()]  # type: ignore[operator]
    end = {"weights": weights, "step": training.step}
    (folder / f"end-{dist.get_rank()}.json").write_text(json.dumps(end))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
