"""A training with the real Lightning in this process, with one rank: the model, and fits in one folder.

Knows no callback of ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning import pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

BATCHES = 20


def model_class(framework: Any) -> Any:
    """The model, as a module of this Lightning."""

    class Model(framework.LightningModule):  # type: ignore[misc]
        """One linear layer; raises what it is given in the batch it is told."""

        def __init__(self, error: BaseException | None = None, at: int = 3, where: str = "training") -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.error, self.at, self.where = error, at, where

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            self.fail("training", index)
            return self.layer(batch).square().mean()

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            if not self.trainer.sanity_checking:
                self.fail("validation", index)
            self.log("loss", self.layer(batch).square().mean() * 0 + 1.0)

        test_step = validation_step

        def fail(self, where: str, index: int) -> None:
            if self.error is not None and (where, index) == (self.where, self.at):
                raise self.error

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

        def train_dataloader(self) -> DataLoader[torch.Tensor]:
            return DataLoader(torch.ones(BATCHES, 2))  # type: ignore[arg-type]

        def val_dataloader(self) -> DataLoader[torch.Tensor]:
            return DataLoader(torch.ones(3, 2))  # type: ignore[arg-type]

        test_dataloader = val_dataloader

    return Model


Model = model_class(pl)


class Job:
    """Fits in one folder, one after the other, each as a job of its own would make it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.flag = folder, folder / "finished"

    def fit(
        self, watch: Any, *others: Any, model: Any = None, framework: Any = pl, kept: int = 1, **limits: Any
    ) -> Any:
        """Trains, and returns the trainer. `kept`: how many checkpoints are, beside the last; -1: all."""
        keeper = ModelCheckpoint(self.folder / "checkpoints", every_n_train_steps=4, save_last=True, save_top_k=kept)
        options = {"accelerator": "cpu", "logger": False, "max_epochs": -1} | limits
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": self.folder}
        trainer = framework.Trainer(callbacks=[watch, keeper, *others], **quiet, **options)
        trainer.fit(model or Model(), ckpt_path="last")
        return trainer

    def learned(self) -> list[str]:
        """What the state file says was learned."""
        file = self.folder / "_ft_state.json"
        found = json.loads(file.read_text())["current_timeouts"] if file.exists() else {}
        section = found.get("section", {})
        names = [*found.get("heartbeat", {})][:2] + section.get("calculated_sections", [])
        return names + ["out_of_section"] * section.get("is_out_of_section_calculated", False)
