"""A training with Megatron-LM's order of calls, written against the documented API of `nvidia_resiliency_ext`.

Knows nothing of ours: the alias, and nothing else, is what makes it run.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import nvidia_resiliency_ext
import torch
import torch.distributed as dist
from nvidia_resiliency_ext import fault_tolerance, inprocess
from nvidia_resiliency_ext.attribution.straggler import Detector

try:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
except ImportError:
    AsyncCallsQueue = None

ITERATIONS, WARMUP, EVALUATIONS = 8, 2, 3
SECTIONS = ["setup", "step", "checkpointing"]


class Training:
    """One rank. `order.json` in the folder names the step in which rank 1 hangs, once; null: in none."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, int(os.environ["RANK"])
        self.hang_at = json.loads((folder / "order.json").read_text())["hang_at"]
        self.client = fault_tolerance.RankMonitorClient()
        self.args = global_arguments()

    def run(self) -> None:
        """What Megatron-LM does, in its order."""
        self.client.init_workload_monitoring(num_warmup_iters=WARMUP)
        state_file = self.folder / "ft_state.json"
        if state_file.exists():
            self.client.load_state_dict(json.loads(state_file.read_text()))
        self.client.start_section("setup")
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        Detector.initialize(report_time_interval=60.0)
        time.sleep(0.6 * self.rank)  # the limit must be that of the slowest rank
        self.client.end_section("setup")
        for iteration in range(self._resumed(model), ITERATIONS):
            self.args.curr_iteration = iteration
            self._step(model, optimizer, iteration)
            self._save(model, iteration + 1)
        self._evaluate(model)
        report = Detector.generate_report()
        self.client.calculate_and_set_section_timeouts(selected_sections=["setup"], calc_out_of_section=False)
        self.client.calculate_and_set_section_timeouts(selected_sections=SECTIONS[1:], calc_out_of_section=True)
        state = self.client.state_dict()
        write(self.folder / f"state-of-{self.rank}", json.dumps(state))
        if self.rank == 0:
            assert report is not None
            write(state_file, json.dumps(state))
        self.client.shutdown_workload_monitoring()
        Detector.shutdown()
        # torch 2.13 can end in a deadlock where a DDP model holds the last reference to a group: its destructor waits,
        # with the GIL, for the thread of gloo, which needs the GIL to let go of the last collective.
        del model, optimizer
        dist.barrier()
        dist.destroy_process_group()

    def _step(self, model: Any, optimizer: Any, iteration: int) -> None:
        self.client.start_section("step")
        with Detector.detection_section("train_step", profile_cuda=False):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        if self.rank == 1 and iteration == self.hang_at and first_time(self.folder / "injected"):
            time.sleep(600)
        self.client.end_section("step")

    def _save(self, model: Any, iteration: int) -> None:
        self.client.start_section("checkpointing")
        if self.rank == 0:
            weight = model.module.weight.item()
            write(self.folder / "checkpoint", json.dumps({"iteration": iteration, "weight": weight}))
        self.client.end_section("checkpointing")

    def _resumed(self, model: Any) -> int:
        file = self.folder / "checkpoint"
        if not file.exists():
            return 0
        saved = json.loads(file.read_text())
        with torch.no_grad():
            model.module.weight.fill_(saved["weight"])
        return int(saved["iteration"]) % ITERATIONS

    def _evaluate(self, model: Any) -> None:
        """Evaluation has a warm-up of its own: its first steps stand in no section."""
        for step in range(EVALUATIONS):
            if step >= WARMUP:
                self.client.start_section("step")
            with torch.no_grad():
                model(torch.ones(1, 1))
            if step >= WARMUP:
                self.client.end_section("step")


def global_arguments() -> Any:
    """Megatron's global arguments, where it keeps them."""
    module = types.ModuleType("megatron.training.global_vars")
    module._GLOBAL_ARGS = types.SimpleNamespace(curr_iteration=0)  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return module._GLOBAL_ARGS


def first_time(file: Path) -> bool:
    """Whether nobody was here before."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def write(file: Path, text: str) -> None:
    """Replaces a file as a whole."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.rename(file)


if __name__ == "__main__":
    assert AsyncCallsQueue is None, "callers with a guard go on"
    assert nvidia_resiliency_ext.__version__ == "0.6.0"
    assert callable(inprocess.Wrapper) and callable(inprocess.rank_assignment.ShiftRanks)
    Training(Path(sys.argv[1])).run()
