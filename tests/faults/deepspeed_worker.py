"""What the ranks of `test_deepspeed.py` run: a training by DeepSpeed's engine, with the recipe of
docs/memory_checkpoint.md as it stands there.

Rank 1 is killed after step 13, all ranks in the next cycle after step 27. At the end the ranks train once more, from
nothing and without faults, and compare.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ft_client as ft

STEPS = 40
PAGE = Path(__file__).parents[2] / "docs" / "memory_checkpoint.md"
PLACE = re.compile(r"^## DeepSpeed$.*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    # `torch_adam`: DeepSpeed's own Adam is compiled at its first use.
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 30}},
}


class Setup:
    """A training whose weights depend on moments, schedule and on the batch of each step and rank."""

    def __init__(self, zero_stage: int) -> None:
        torch.manual_seed(7)
        plain = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
        config = {**CONFIG, "zero_optimization": {"stage": zero_stage}}
        self.engine, *_ = deepspeed.initialize(model=plain, model_parameters=plain.parameters(), config=config)

    def train_step(self) -> None:
        batches = torch.Generator().manual_seed(1000 * self.engine.global_steps + dist.get_rank())
        loss = self.engine(torch.randn(4, 16, generator=batches)).square().mean()
        self.engine.backward(loss)
        self.engine.step()

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.engine.module.parameters()]


def faults(step: int) -> None:
    cycle = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if (cycle, step) == (1, 27) or (cycle, step, dist.get_rank()) == (0, 13, 1):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    deepspeed.init_distributed("gloo")
    zero_stage = int(os.environ["ZERO_STAGE"])
    recipe = PLACE.findall(PAGE.read_text())[0]
    setup = Setup(zero_stage)

    def train_step() -> None:
        setup.train_step()
        faults(setup.engine.global_steps)

    names: dict[str, Any] = {
        **{"ft": ft, "engine": setup.engine, "train_step": train_step},
        **{"STEPS": STEPS, "SAVE_EVERY": 5, "on_disk": 0},
    }
    exec(compile(recipe, str(PAGE), "exec"), names)
    trained = setup.weights()
    again = Setup(zero_stage)
    while again.engine.global_steps < STEPS:
        again.train_step()
    same = all(torch.equal(one, other) for one, other in zip(trained, again.weights(), strict=True))
    found = {"steps": setup.engine.global_steps, "same": same}
    Path(sys.argv[-1], f"end-{dist.get_rank()}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
