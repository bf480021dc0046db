"""A training that a signal ends after a step, saved, on all ranks alike, and that goes on from there when run again.

ft_launcher --nproc-per-node=2 scripts/examples/preemption.py --folder /tmp/preemption     send it SIGTERM: 86
ft_launcher --nproc-per-node=2 scripts/examples/preemption.py --folder /tmp/preemption     goes on to the end: 0
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from ft_client.preemption import PreemptionGuard


def batches(rank: int, start: int, steps: int) -> list[torch.Tensor]:
    """The data of a rank from step `start` on."""
    return [torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * rank + n)) for n in range(start, steps)]


def train(folder: Path, sig: int, steps: int, step_s: float) -> None:
    """Runs to the end; a signal to any rank ends it earlier, with a checkpoint."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Linear(4, 1)
    saved, step = folder / f"checkpoint-{rank}.pt", 0
    if saved.exists():
        checkpoint = torch.load(saved)
        model.load_state_dict(checkpoint["model"])
        step = checkpoint["step"]
        print(f"rank {rank}: resumed after step {step}", flush=True)

    def save() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model.state_dict(), "step": step}, saved)

    with PreemptionGuard(save, sig=sig) as guard:
        for batch in DataLoader(batches(rank, step, steps), batch_size=None, num_workers=1):
            model.zero_grad()
            model(batch).square().mean().backward()
            for parameter in model.parameters():
                if dist.is_initialized():
                    dist.all_reduce(parameter.grad)
                parameter.data.sub_(0.01 * parameter.grad)
            time.sleep(step_s)
            step += 1
            print(f"rank {rank}: step {step}", flush=True)
            guard.check()
    weights = " ".join(f"{weight:.6f}" for weight in model.weight.flatten().tolist())
    print(f"rank {rank}: {step} steps done, weights {weights}", flush=True)


def main() -> None:
    """The command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints are")
    parser.add_argument("--signal", default="SIGTERM", help="what ends it: the launcher's --ft-preemption-signal")
    parser.add_argument("--steps", type=int, default=100, help="how many")
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds that a step takes besides")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    try:
        train(options.folder, signal.Signals[options.signal], options.steps, options.step_s)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
