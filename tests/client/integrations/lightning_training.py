"""A training with the real Lightning, as a launcher's rank runs it: `lightning_training.py FOLDER`.

FOLDER/fits.json says which fits to make, one after the other, and which faults happen in which cycle. Every batch is
written down in FOLDER/seen: the cycle, the rank, the number of the fit, the step before the batch.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from ft_client.integrations import lightning as ours
from rank_monitor.contract import env

BATCHES = 20
RANKS = 2


class Model(pl.LightningModule):
    """One linear layer; fails where it is told to."""

    def __init__(self, fault: dict[str, Any], step_s: float, note: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.fault, self.step_s, self.note = fault, step_s, note

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.note(self.global_step)
        time.sleep(self.step_s)
        self.inject("training", self.global_step)
        return self.layer(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        if not self.trainer.sanity_checking:
            self.inject("validation", self.global_step)
        self.log("loss", self.layer(batch).square().mean() + 1.0, sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.inject("saving", self.global_step)

    def inject(self, where: str, step: int) -> None:
        fault = self.fault
        if fault.get("in") != where or step < fault["step"] or fault["rank"] != self.global_rank:
            return
        match fault["what"]:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "waits":
                time.sleep(600)
            case "raises":
                raise ValueError("a bad sample")
            case "exits":
                sys.exit(0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.ones(2 * RANKS * BATCHES, 2), batch_size=2)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.ones(4 * RANKS, 2), batch_size=2)


def fit(folder: Path, number: int, plan: dict[str, Any], cycle: int, rank: int) -> None:
    """Makes one fit as the plan has it."""
    faults = plan.get("faults", {}).get(str(cycle), {})
    at = folder / plan.get("folder", "training")
    os.environ[env.FINISHED_FLAG_FILE] = str(at / "finished")
    kind = {"heartbeats": ours.FaultToleranceCallback, "sections": ours.FaultToleranceSectionsCallback}[plan["watch"]]
    watch = kind(True, True, faults.get("simulated"), exp_dir=at if plan.get("exp_dir", True) else None)
    callbacks = [
        watch,
        ModelCheckpoint(at / "checkpoints", every_n_train_steps=plan.get("saves_every", 4), save_last=True),
    ]
    if plan.get("patience"):
        callbacks.append(EarlyStopping("loss", patience=plan["patience"], verbose=False))
    if plan.get("stragglers"):
        # So short that a fit of 16 steps has a report on a machine that makes one in a millisecond.
        callbacks.append(ours.StragglerDetectionCallback(0.002, True, True, 2, 0.7, 0.7, False, True))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        logger=CSVLogger(at / "logs") if plan.get("logger") else False,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **plan["limits"],
    )
    with (folder / "seen").open("a") as seen:
        model = Model(
            faults.get("inject", {}),
            plan.get("step_s", 0.0),
            lambda step: print(cycle, rank, number, step, file=seen, flush=True),
        )
        trainer.fit(model, ckpt_path="last")


def main(folder: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    logging.getLogger("torch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    cycle, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    for number, plan in enumerate(json.loads((folder / "fits.json").read_text())):
        fit(folder, number, plan, cycle, rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
