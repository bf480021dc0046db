"""A Lightning training under the launcher: watched by sections, it goes on from the last checkpoint after a fault.

    ftrun --nproc-per-node=2 --max-restarts=1 --ft-preload=lightning.pytorch \\
        --ft-inject rank:1,kind:sigkill,step:30 scripts/examples/lightning_training.py

Rank 1 dies at step 30, and both go on from the checkpoint of step 20. At the end the finished flag is there: whoever
starts jobs one after the other may stop. Another job finds nothing left to do.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from ft_client.integrations.lightning import FaultToleranceSectionsCallback


class Line(pl.LightningModule):
    """Learns y = 3 x."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def main() -> None:
    """Trains, from the last checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("lightning_out"))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    os.environ.setdefault("FAULT_TOL_FINISHED_FLAG_FILE", str(options.folder / "finished"))

    watch = FaultToleranceSectionsCallback(
        autoresume=True,  # write the finished flag when the training is complete
        calculate_timeouts=True,  # learn the limits of sections, keep them for the next job
        exp_dir=options.folder / "ft_state",
    )
    x = torch.rand(512, 1)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_steps=options.steps,
        max_epochs=-1,
        callbacks=[watch, ModelCheckpoint(options.folder, every_n_train_steps=10, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Line()
    trainer.fit(model, DataLoader(TensorDataset(x, 3 * x), batch_size=16), ckpt_path="last")
    print(f"rank {trainer.global_rank}: step {trainer.global_step}, weight {model.layer.weight.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
