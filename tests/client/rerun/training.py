"""A small training that draws random numbers of every kind, with checks of its loss and faults that repeat on demand.

It ends with the exit code that the machine asks for. Weights are comparable bit for bit between jobs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ft_client.rerun import RerunDataIterator, RerunErrorInjector, RerunStateMachine

MICROBATCHES = 2
NAN = "loss is NaN"
SPIKE = "loss is unexpectedly large"


def microbatches(rank: int, start: int) -> Iterator[torch.Tensor]:
    """The stream of a rank, from the first microbatch of step `start` on."""
    for number in itertools.count(start * MICROBATCHES):
        yield torch.tensor([float(rank + 1), float(number)])


class Model:
    """Weights, a count that is not a part of them, and a loss with noise of every generator."""

    def __init__(self, rank: int) -> None:
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)
        self.weight, self.draws = torch.zeros(2), 0

    def loss(self, microbatch: torch.Tensor) -> torch.Tensor:
        self.draws += 1
        noise = random.random() + float(np.random.rand()) + torch.rand(()) + self.draws
        return (microbatch * noise).sum() + self.weight.sum()

    def step(self, losses: list[torch.Tensor], world_size: int) -> None:
        gradient = torch.stack(losses).sum().reshape(1)
        if world_size > 1:
            dist.all_reduce(gradient)
        self.weight = self.weight + 0.001 * gradient

    def set_draws(self, draws: int) -> None:
        self.draws = draws


def train(
    rank: int,
    world_size: int,
    *,
    steps: int = 4,
    bad_step: int = 2,
    bad_runs: Mapping[int, Sequence[int]] = MappingProxyType({}),
    bad_value: float = float("nan"),
    harmless: bool = False,
    fatal: bool = True,
    node: str = "a",
    checkpoints: str = "/nowhere",
    data: str = "one",
    loader: str = "after",
    mode: str = "validate_results",
    rate: int = 0,
    injected: str = "transient_error",
    tracker: str | None = None,
) -> dict[str, Any]:
    """One rank's job.

    Args:
        bad_runs: by rank, the runs of `bad_step` in this job, from 0, in which the rank's loss becomes `bad_value`.
        harmless: only the checks see that value; else the weights do, too.
        checkpoints: folder; what is there is loaded.
        data: "one" iterator, a "list" of two and a gap, or "none".
        loader: a resumed one begins "before" the step in doubt, or "after" what was drawn.
    """
    model, saved, start = Model(rank), Path(checkpoints) / f"checkpoint-{rank}", 0
    resumed = torch.load(saved) if saved.exists() else None
    if resumed:
        model.weight, model.draws, start = resumed["weight"], resumed["draws"], resumed["steps"]
    stream = microbatches(rank, start + (resumed is not None and loader == "after"))
    wrapped = RerunDataIterator(stream, skip_replayed=loader == "before")
    iterators: Any = {"one": wrapped, "list": [RerunDataIterator([1]), None, wrapped], "none": None}[data]
    machine = RerunStateMachine(
        lambda: model.draws,
        model.set_draws,
        mode=mode,
        error_injector=RerunErrorInjector(rate, injected),
        result_rejected_tracker_filename=tracker,
        node_name=node,
    )
    if resumed:
        assert machine.validate_state_dict(resumed["rerun"])
        machine.load_state_dict(resumed["rerun"])
    told: dict[str, Any] = {"seen": [], "diagnostics": [], "saved": False}

    def run(wrong: bool) -> list[torch.Tensor]:
        losses, seen = [], []
        for index in range(MICROBATCHES):
            microbatch = next(wrapped if data != "none" else stream)
            loss = model.loss(microbatch)
            checked = torch.tensor(bad_value) if wrong and index == 1 else loss
            machine.validate_result(checked, torch.isnan, NAN, fatal=fatal)
            large = partial(machine.is_unexpectedly_large, threshold=10, context="loss", num_samples=2)
            machine.validate_result(checked, large, SPIKE, fatal=False)
            losses.append(loss if harmless else checked)
            seen.append(microbatch.tolist())
        told["seen"].append([machine.current_iteration, seen])
        return losses

    done, code = start, 0
    while done < steps:
        runs = itertools.count()
        while machine.should_run_forward_backward(iterators):
            losses = run(done == bad_step and next(runs) in bad_runs.get(rank, ()))
        told["diagnostics"].append(machine.diagnostic and machine.diagnostic.value)
        checkpoint, leave, code = machine.should_checkpoint_and_exit()
        if checkpoint and saved.parent.exists():
            kept = {"weight": model.weight, "steps": done, "draws": model.draws}
            torch.save(kept | {"rerun": machine.state_dict(iterators)}, saved)
            told["saved"] = True
        if leave:
            break
        model.step(losses, world_size)
        done += 1
    end = {"code": code, "steps": done, "state": machine.state.value}
    return told | end | {"weight": model.weight.tolist(), "draws": model.draws}
