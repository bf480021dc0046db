"""A training that computes a step again when its loss is NaN, and asks for other hardware when that comes again.

    python scripts/examples/rerun.py --folder /tmp/rerun --node a --broken-node a    exits with 16, after a checkpoint
    python scripts/examples/rerun.py --folder /tmp/rerun --node b --broken-node a    names node a, exits with 17
    python scripts/examples/rerun.py --folder /tmp/rerun --node b                    goes on to the end

Under `ft_launcher`, with two nodes or a spare, one command does it all: after 16 the launcher has rank 0 run elsewhere.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ft_client.rerun import RerunDataIterator, RerunStateMachineConfig

STEPS = 6
BROKEN_STEP = 3


def microbatches(rank: int, start: int) -> Iterator[torch.Tensor]:
    """The data of a rank, from step `start` on."""
    for step in itertools.count(start):
        yield torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * rank + step))


def make_model() -> nn.Sequential:
    """The net, with the same weights on every rank."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Dropout(0.5))
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    return model


def train(model: nn.Sequential, folder: Path, node: str, broken: bool) -> int:
    """Runs to the end, or to the exit that the rerun machine asks for; the exit code."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.set_num_threads(1)
    config = RerunStateMachineConfig(rerun_mode="validate_results")
    machine = config.initialize(node_name=node)
    saved, step = folder / f"checkpoint-{rank}.pt", 0
    if saved.exists():
        checkpoint = torch.load(saved)
        model.load_state_dict(checkpoint["model"])
        machine.load_state_dict(checkpoint["rerun"])
        step = checkpoint["step"]
    data = RerunDataIterator(microbatches(rank, step), skip_replayed=True)  # the loader begins with the step in doubt

    while step < STEPS:
        while machine.should_run_forward_backward(data):
            model.zero_grad()
            loss = model(next(data)).square().mean()
            if step == BROKEN_STEP and broken and rank == 0:
                loss = loss * float("nan")  # what a broken device does, or broken data
            config.validate_loss(loss)
            loss.backward()
        save, leave, code = machine.should_checkpoint_and_exit()
        if save:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "step": step, "rerun": machine.state_dict(data)}, saved)
        if leave:
            return code
        for parameter in model.parameters():
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
            parameter.data.sub_(0.1 * parameter.grad.nan_to_num())
        step += 1
    print(f"rank {rank}: {STEPS} steps done, weights {model[0].weight.sum().item():.6f}", flush=True)
    return 0


def main() -> None:
    """The command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is")
    parser.add_argument("--node", default="a", help="the name of this node")
    parser.add_argument("--broken-node", help="the node on which the loss of rank 0 is NaN in step 3")
    parser.add_argument("--broken-data", action="store_true", help="it is NaN there on any node")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    # It lives longer than the group: torch 2.6 may hang at the end of a group whose last reduced tensor is gone.
    model = make_model()
    code = train(model, options.folder, options.node, options.broken_data or options.node == options.broken_node)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    main()
