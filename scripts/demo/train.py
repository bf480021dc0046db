"""A training to copy from: handwritten digits, DDP on gloo, restarted where it stopped.

Three things make it restartable, and none of them needs a launcher of ours: a checkpoint that is whole or absent, a
place (epoch and batch) inside it, and randomness that follows from the place. The `ft` calls name what the ranks are
doing, so that a hang is found in seconds, and keep the state in memory between two checkpoints; without our launcher
they do nothing.
Two ranks end with the same weights bit for bit after any restart; with more, the order of a sum may differ in it.

    ft_launcher --standalone --nproc-per-node 2 --max-restarts 3 --ft-rank-section-timeouts step:5 train.py
    torchrun    --standalone --nproc-per-node 2 --max-restarts 3 train.py
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ft_client as ft

SEED = 7
BATCH_SIZE = 32


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1797 images of 8 x 8 pixels: four fifths to train on, one fifth held out for the test."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=SEED)
    train_x, test_x = (torch.tensor(part / 16, dtype=torch.float32).reshape(-1, 1, 8, 8) for part in parts[:2])
    train_y, test_y = (torch.tensor(part) for part in parts[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def convolutional_net() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.25), nn.Linear(128, 10)),
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()


def save_checkpoint(path: Path, state: dict[str, object]) -> None:
    """Under its name there is always a whole checkpoint: written beside it, made durable, then renamed over it."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Returns the epoch and the batch at which the checkpoint goes on; the beginning where there is none."""
    if not path.exists():
        return 0, 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"], state["batch"]


def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    images, labels = dataset.tensors
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).float().mean())


def weights_digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder of the checkpoint and the result")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--checkpoint-every", type=int, default=8, help="batches; each epoch ends with one anyway")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = args.out / "checkpoint.pt"

    ft.init()
    with ft.section("setup"):
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        train_set, test_set = digits()
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(train_set, seed=SEED)
        loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler)
        net = convolutional_net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
        first_epoch, first_batch = load_checkpoint(checkpoint, net, optimizer)
        model = DistributedDataParallel(net)
        keep = ft.MemoryCheckpoint(model=model, optimizer=optimizer)
        kept_step = keep.load(newer_than=first_epoch * len(loader) + first_batch)
        if kept_step:
            first_epoch, first_batch = divmod(kept_step, len(loader))
        print(f"rank {rank} begins at epoch {first_epoch}, batch {first_batch}", flush=True)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        start = first_batch if epoch == first_epoch else 0
        for batch, (images, labels) in enumerate(itertools.islice(loader, start, None), start):
            step = epoch * len(loader) + batch
            with ft.section("step"):
                torch.manual_seed(step * dist.get_world_size() + rank)  # a resumed run draws the same dropout
                train_step(model, optimizer, images, labels)
            ft.report_iteration(step)
            keep.step(step + 1)  # between two checkpoints on disk, in memory: a fault then costs a step or two

            done = batch + 1
            if done % args.checkpoint_every == 0 or done == len(loader):
                place = {"epoch": epoch + 1, "batch": 0} if done == len(loader) else {"epoch": epoch, "batch": done}
                with ft.section("checkpointing"):
                    if rank == 0:
                        states = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                        save_checkpoint(checkpoint, {**states, **place})
                    dist.barrier()

    result = {"test_accuracy": accuracy(net, test_set), "weights_sha256": weights_digest(net)}
    if rank == 0:
        (args.out / "result.json").write_text(json.dumps(result))
        print(f"test accuracy {result['test_accuracy']:.4f}", flush=True)
    del model  # else it owns the group last, and torch may wait for ever for the group's thread
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
