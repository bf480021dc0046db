"""What the ranks of `test_accelerate.py` run: a training by accelerate, with the recipe of docs/memory_checkpoint.md as
it stands there.

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

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

import ft_client as ft

STEPS = 40
PAGE = Path(__file__).parents[2] / "docs" / "memory_checkpoint.md"
PLACE = re.compile(r"^## accelerate$.*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Setup:
    """A training whose weights depend on moments, schedule and each rank's random numbers."""

    def __init__(self) -> None:
        torch.manual_seed(7 + dist.get_rank())
        self.accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(save_on_each_node=True))
        layers = (torch.nn.Linear(16, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 16))
        plain = torch.nn.Sequential(*layers)
        optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(plain, optimizer, schedule)

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 16)).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()

    def weights(self) -> list[Any]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def faults(step: int) -> None:
    cycle = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if (cycle, step) == (1, 27) or (cycle, step, dist.get_rank()) == (0, 13, 1):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    dist.init_process_group("gloo")
    recipe = PLACE.findall(PAGE.read_text())[0]
    setup = Setup()

    def train_step() -> None:
        setup.train_step()
        faults(names["progress"].steps + 1)

    names: dict[str, Any] = {
        **{"ft": ft, "accelerator": setup.accelerator, "train_step": train_step},
        **{"STEPS": STEPS, "SAVE_EVERY": 5, "on_disk": 0},
    }
    exec(compile(recipe, str(PAGE), "exec"), names)
    trained = setup.weights()
    again = Setup()
    for _ in range(STEPS):
        again.train_step()
    same = all(torch.equal(one, other) for one, other in zip(trained, again.weights(), strict=True))
    found = {"steps": names["progress"].steps, "same": same}
    Path(sys.argv[-1], f"end-{dist.get_rank()}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
