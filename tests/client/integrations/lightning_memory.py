"""A training with the real Lightning and its state in memory: `lightning_memory.py FOLDER`.

FOLDER/training.json has: `strategy`, `kills` (cycle -> step and ranks), `disk` (steps between checkpoints on disk; 0:
none), `steps`, `async`, `watch` (whether a callback learns limits, for FOLDER/ft), `fits` (how many trainings) and
`raises` (rank and step of a hook that fails). Each rank writes its weights, and a number drawn at the end, to
FOLDER/end-RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy

from ft_client.integrations.lightning import FaultToleranceSectionsCallback, MemoryCheckpoint

BATCHES = 8


class Loader:
    """Batches of an epoch, other ones in each epoch, which go on where they were."""

    def __init__(self) -> None:
        self.epoch, self.at = 0, 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < BATCHES:
            self.at += 1
            number = self.epoch * BATCHES + self.at
            rank = int(os.environ.get("RANK", "0"))
            batch = torch.rand(4, 2, generator=torch.Generator().manual_seed(10 * number + rank))
            if self.at == BATCHES:
                self.epoch, self.at = self.epoch + 1, 0
                yield batch
                return
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class Model(pl.LightningModule):
    """Learns, with dropout; is killed where the plan says so."""

    def __init__(self, kills: dict[str, Any], seen: Path, raises: Any) -> None:
        super().__init__()
        self.raises = raises
        self.layer = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.cycle = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.kill, self.seen = kills.get(self.cycle), seen

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        with self.seen.open("a") as seen:
            seen.write(f"{self.cycle} {self.global_rank} {self.global_step}\n")
        if self.kill and self.global_step >= self.kill["step"] and self.global_rank in self.kill["ranks"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        if self.raises == [self.global_rank, self.global_step]:
            raise KeyError("the hook fails")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9), "interval": "step"}]

    def train_dataloader(self) -> Any:
        return Loader()


def main(folder: Path) -> None:
    plan = json.loads((folder / "training.json").read_text())
    for _ in range(plan["fits"]):
        train(folder, plan)


def train(folder: Path, plan: dict[str, Any]) -> None:
    disk = folder / "disk"
    callbacks: list[Any] = [MemoryCheckpoint()]
    if plan["watch"]:
        callbacks.append(FaultToleranceSectionsCallback(True, True, exp_dir=folder / "ft"))
    if plan["disk"]:
        callbacks.append(ModelCheckpoint(disk, every_n_train_steps=plan["disk"], save_last=True))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.manual_seed(1)
    model = Model(plan["kills"], folder / "seen", plan["raises"])
    torch.manual_seed(100 + int(os.environ.get("RANK", "0")))
    strategy: Any = plan["strategy"]
    if strategy == "sharded":
        strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy=strategy,
        max_steps=plan["steps"],
        max_epochs=-1,
        callbacks=callbacks,
        plugins=[AsyncCheckpointIO()] if plan["async"] else [],
        logger=False,
        enable_checkpointing=bool(plan["disk"]),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(model, ckpt_path=MemoryCheckpoint.latest(newer_than=disk) or "last")
    weights = [value.to_local() if hasattr(value, "to_local") else value for value in model.parameters()]
    end = {
        "weights": [value.tolist() for value in weights],
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "drawn": torch.rand(1).item(),
    }
    (folder / f"end-{trainer.global_rank}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
