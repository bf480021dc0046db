"""What the ranks of `test_local_checkpoints.py` run: a small training with local checkpoints by the names of NVIDIA's
package, as Megatron-LM makes them. Nothing of ours is imported for them.

The script's argument is the test's folder. `local.json` in it has `steps`, `is_async` and `faults`: a list of cycle,
step, ranks and the name of a function below. At the end the last ranks train once more, from nothing and without
faults, and compare.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

EVERY = 5
"""Steps between two saves."""


class Queue:
    """Carries saves out in a forked process, one after the other, as a program's own queue does."""

    def __init__(self) -> None:
        self.request: Any = None
        self.process: Any = None

    def schedule(self, request: Any) -> None:
        context = torch.multiprocessing.get_context("fork")
        self.request = request
        self.process = context.Process(target=request.async_fn, args=request.async_fn_args)
        self.process.start()

    def finalize(self) -> None:
        if self.request is not None:
            self.process.join()
            for function in self.request.finalize_fns:
                function()
            self.request = None


def train(plan: dict[str, Any], manager: Any, after_step: Callable[[int], None]) -> tuple[int, list[Any]]:
    """Trains. Returns the step from which the training went on, and the weights."""
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    start, queue = 0, Queue()
    if manager is not None and manager.find_latest() != -1:
        start = manager.find_latest()
        loaded = manager.load()[0].state_dict
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        torch.set_rng_state(loaded["rng"])
    for step in range(start + 1, plan["steps"] + 1):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        queue.finalize()
        if manager is not None and step % EVERY == 0:
            # As Megatron's own class, this one changes the dicts that it is given.
            moments = optimizer.state_dict()
            moments["state"] = {number: dict(kept) for number, kept in moments["state"].items()}
            state = {"model": dict(model.state_dict()), "optimizer": moments, "rng": torch.get_rng_state()}
            request = manager.save(BasicTensorAwareStateDict(state), step, is_async=plan["is_async"])
            if request is not None:
                queue.schedule(request)
        after_step(step)
    queue.finalize()
    return start, [parameter.detach().clone() for parameter in model.parameters()]


def dies(manager: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_while_it_writes(manager: Any) -> None:
    """In the next save, when a part of the file is written."""

    def half(state: Any, file: Any) -> None:
        file.write(b"half")
        dies(manager)

    torch.save = half


def flips_a_byte_and_dies(manager: Any) -> None:
    (path,) = manager.local_ckpt_dir.glob("iter_*_local.pt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    dies(manager)


def kills_the_launcher(manager: Any) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def main() -> None:
    out = Path(sys.argv[-1])
    plan = json.loads((out / "local.json").read_text())
    cycle = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    manager = LocalCheckpointManager(out / "local")

    def after_step(step: int) -> None:
        for at_cycle, at_step, ranks, what in plan["faults"]:
            if (at_cycle, at_step) == (cycle, step) and rank in ranks:
                globals()[what](manager)

    start, weights = train(plan, manager, after_step)
    _, expected = train(plan, None, lambda step: None)
    same = all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
    found = {"start": start, "same": same, "folder": str(manager.local_ckpt_dir)}
    (out / f"end-{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
