"""Straggler detection: four ranks on CPU, one of which is slow, found by the time of the section around its own work.

    ftrun --nproc-per-node=4 scripts/examples/straggler.py --slow-rank=2

Rank 0 prints the scores and a warning; then all ranks stop together with exit code 0. torchrun and a GPU do as well.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

import torch
import torch.distributed as dist

from ft_client.straggler import Detector, StragglerManager


def main() -> int:
    """Trains until a straggler is found; 1 when none is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow-rank", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two reports")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gradient = torch.ones(1000)

    training = StragglerManager(report_time_interval=options.interval, stop_if_detected=True, enable_logging=False)
    training.initialize()

    @training.wrap_train_step_function
    def train_step() -> None:
        with Detector.detection_section("own work"):  # what this rank does without waiting for others
            time.sleep(0.05 if rank == options.slow_rank else 0.01)
        dist.all_reduce(gradient)  # in here everybody waits for the slowest

    for step in range(options.steps):
        train_step()
        if training.check_stragglers(rank):  # on all ranks at the same step
            print(f"rank {rank} saves and stops after step {step}", flush=True)
            break
    else:
        print("no straggler was found", flush=True)
        return 1
    training.shutdown()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
