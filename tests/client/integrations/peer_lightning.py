"""A Lightning training with the callbacks of `nvidia_resiliency_ext.ptl_resiliency`, after their documentation."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from nvidia_resiliency_ext.ptl_resiliency import FaultToleranceCallback, StragglerDetectionCallback
from nvidia_resiliency_ext.ptl_resiliency.fault_tolerance_callback import SimulatedFaultParams
from torch.utils.data import DataLoader

STEPS = 24


class Model(pl.LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and self.global_step == STEPS // 2:
            raise RuntimeError("a bad batch, once")
        time.sleep(0.005)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def main(folder: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    os.environ["FAULT_TOL_FINISHED_FLAG_FILE"] = str(folder / "finished")
    fault_tol_cb = FaultToleranceCallback(
        autoresume=True,
        calculate_timeouts=True,
        simulated_fault_params=SimulatedFaultParams(fault_type="rank_hung", base_delay=3600.0, rank_to_fail=1),
        logger_name="test_logger",
        exp_dir=folder,
    )
    straggler_cb = StragglerDetectionCallback(
        report_time_interval=0.02,
        calc_relative_gpu_perf=True,
        calc_individual_gpu_perf=True,
        num_gpu_perf_scores_to_print=2,
        gpu_relative_perf_threshold=0.1,
        gpu_individual_perf_threshold=0.1,
        stop_if_detected=False,
        enable_ptl_logging=False,
        logger_name="test_logger",
    )
    saves = pl.callbacks.ModelCheckpoint(folder / "checkpoints", every_n_train_steps=6, save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=STEPS,
        max_epochs=-1,
        callbacks=[fault_tol_cb, straggler_cb, saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(torch.ones(64, 2), batch_size=4), ckpt_path="last")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
