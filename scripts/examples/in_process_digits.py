"""A training that faults restart in process: digits, DDP on gloo, the demo's net; checkpoints are kept in memory.

Trains twice in the same processes, without and with faults on purpose (an exception, a rank that hangs), and compares
the weights bit for bit. The exit code is 0 only if they are the same. Any of these starts it:

    ft_launcher --nproc-per-node 2 scripts/examples/in_process_digits.py
    torchrun    --nproc-per-node 2 scripts/examples/in_process_digits.py
    export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500  # no launcher at all
    RANK=1 python scripts/examples/in_process_digits.py & RANK=0 python scripts/examples/in_process_digits.py
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ft_client.inprocess import CallWrapper, Wrapper

sys.path.append(str(Path(__file__).resolve().parents[1] / "demo"))
from train import BATCH_SIZE, SEED, accuracy, convolutional_net, digits, train_step, weights_digest

CHECKPOINT_EVERY = 8


def fail() -> None:
    raise ValueError("a bad sample, on purpose")


def hang() -> None:
    time.sleep(3600)


@dataclass
class Fault:
    """`inject` is called on a rank in a step, once."""

    rank: int
    step: int
    inject: Callable[[], None]
    was_injected: bool = False


@dataclass
class Memory:
    """What outlives an iteration: the last checkpoint of this process, and the faults ahead.

    The function gets the same object in each iteration, since a restart calls it with the same arguments.
    """

    faults: list[Fault] = field(default_factory=list)
    step: int = 0
    state: dict[str, Any] | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Keeps a copy."""
        copied = copy.deepcopy(state)
        self.step, self.state = step, copied

    def load(self) -> None:
        """Takes the newest checkpoint that any rank has: one may be behind, or new here."""
        steps: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(steps, self.step)
        newest = [(self.step, self.state)]
        dist.broadcast_object_list(newest, src=steps.index(max(steps)))
        self.step, self.state = newest[0]

    def inject(self, rank: int, step: int) -> None:
        """What is to happen to this rank in this step."""
        for fault in self.faults:
            if (fault.rank, fault.step) == (rank, step) and not fault.was_injected:
                fault.was_injected = True
                fault.inject()


def train(memory: Memory, epochs: int, call: CallWrapper) -> tuple[str, float, int]:
    """The wrapped function: from the last checkpoint to the end. The weights' digest, accuracy, iteration.

    It makes its process group, model and loader anew each time, and leaves no thread behind.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, seed=SEED)
    loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler)
    net = convolutional_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    memory.load()
    if memory.state is not None:
        net.load_state_dict(memory.state["model"])
        optimizer.load_state_dict(copy.deepcopy(memory.state["optimizer"]))  # it keeps the tensors that it is given
        print(f"rank {rank}: iteration {call.iteration} goes on at step {memory.step}", flush=True)
    model = DistributedDataParallel(net)

    step = memory.step
    for epoch in range(step // len(loader), epochs):
        sampler.set_epoch(epoch)
        for images, labels in itertools.islice(loader, step % len(loader), None):
            torch.manual_seed(step * world_size + rank)  # a step that is done again draws the same dropout
            memory.inject(rank, step)
            train_step(model, optimizer, images, labels)
            call.ping()
            step += 1
            if step % CHECKPOINT_EVERY == 0:
                memory.save(step, {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    result = weights_digest(net), accuracy(net, test_set), call.iteration
    del model  # else it owns the group last, and torch may wait for ever for the group's thread
    dist.destroy_process_group()
    return result


def main() -> int:
    """The command line; 1: the weights differ, or a fault did not restart the function."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--soft-timeout", type=float, default=5.0, help="seconds without progress that are a hang")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    entry = int(os.environ["RANK"])
    wrapped = Wrapper(
        soft_timeout=timedelta(seconds=options.soft_timeout),
        hard_timeout=timedelta(seconds=options.soft_timeout + 60),
        last_call_wait=timedelta(milliseconds=10),
    )(train)

    plain = wrapped(Memory(), options.epochs)
    faulty = wrapped(Memory([Fault(1, 20, fail), Fault(0, 35, hang)]), options.epochs)
    if entry == 0:
        for name, (digest, right, iteration) in {"without faults": plain, "with faults": faulty}.items():
            print(f"{name}: {iteration} restarts, accuracy {right:.4f}, weights {digest[:16]}", flush=True)
    is_same = plain[0] == faulty[0] and faulty[2] >= 2
    print(f"rank {entry}: {'the weights are the same, bit for bit' if is_same else 'FAILED'}", flush=True)
    return int(not is_same)


if __name__ == "__main__":
    sys.exit(main())
