"""What the ranks of `test_memory_checkpoint.py` run: a small training whose state lies in memory.

Its weights depend on the parameters, on Adam's moments, on the schedule, and on random numbers of each rank: they are
the same as without faults only if all of these were kept. At the end the last ranks train once more, from nothing and
without faults, and compare.
"""

from __future__ import annotations

import datetime
import functools
import gc
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ft_client as ft
from ft_client.inprocess.wrapper import Wrapper
from ft_client.memory.background_work import BACKGROUND
from ft_client.memory.rank_files import RankFiles
from ft_client.memory.state_writer import StateWriter
from rank_monitor.contract import env, memory_files
from rank_monitor.contract.exit_codes import ExitCode

PLAN_FILE = "memory.json"
"""JSON: `kind`, `width` and `steps` of the training; `overlap`, whether saves overlap with it; `faults`, a list of
cycle (-1: each), step, ranks and what happens to them (a name of a function below); `prints_after`, the step after
which losses are printed; `notes_weights`, the step whose weights are written to a file, as are those that were
loaded."""

GO_FILE = "go"
"""Ranks wait for it in `waits_for_the_test`."""

OUTLIVE_THE_GROUP: list[Any] = []
"""Models that hold the process group. Gloo's threads free the tensors of the last collectives, and need the GIL for
that. On a busy machine they are late: where the last model ended with its function, its end joined such a thread and
held the GIL, for ever."""


def model_of(kind: str, width: int) -> Any:
    """A model that is parallel in a way: `ddp`, `fsdp`, `hsdp` or `tp`."""
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(width, width)
    )
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        for layer in (model[0], model[3]):
            fully_shard(layer)
        return fully_shard(model)
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
        return fully_shard(model, mesh=mesh)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})


def weights(model: Any) -> list[Any]:
    """All parameters, whole."""
    return [
        (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
        for parameter in model.parameters()
    ]


def note_weights(model: Any, name: str) -> None:
    """Writes all parameters to a file in the test's folder, on the first rank. Collective."""
    whole = weights(model)
    if dist.get_rank() == 0:
        torch.save(whole, Path(sys.argv[1]) / name)


def training(plan: dict[str, Any], keep_state: bool, after_step: Callable[[int], None]) -> tuple[int, Any]:
    """Trains. Returns the step from which the training went on, and the model."""
    torch.manual_seed(1)
    model = model_of(plan["kind"], plan["width"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
    if plan["kind"] != "tp":  # whose ranks must draw the same numbers
        torch.manual_seed(100 + dist.get_rank())
    start = 0
    if keep_state:
        keep = ft.MemoryCheckpoint(
            model=model, optimizer=optimizer, schedule=schedule, overlap=plan.get("overlap", False)
        )
        start = keep.load()
        if plan.get("notes_weights"):
            note_weights(model, f"loaded-{keep.loaded_world}-{start}")
    for step in range(start + 1, plan["steps"] + 1):
        after_step(step - 1)
        optimizer.zero_grad()
        loss = model(torch.randn(8, plan["width"])).square().mean()
        loss.backward()
        if keep_state and step > plan.get("prints_after", plan["steps"]):
            print_loss(step, loss)
        optimizer.step()
        schedule.step()
        if keep_state:
            keep.step(step)
            if plan.get("notes_weights") == step:
                note_weights(model, f"saved-{dist.get_world_size()}-{step}")
    after_step(plan["steps"])
    return start, model


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at_once(folder: Path) -> None:
    """Once the last save has its name."""
    BACKGROUND.wait()
    die()


def kills_the_launcher(folder: Path) -> None:
    """Once the last save has its name. All processes of the job end then."""
    BACKGROUND.wait()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def dies_while_it_copies(folder: Path) -> None:
    """In the next save, when some tensors are copied into a file, and others are not."""
    copy, count = torch.Tensor.copy_, iter(range(5))
    torch.Tensor.copy_ = lambda target, source: copy(target, source) if next(count, None) is not None else die()


def in_the_next_copy_behind_the_training(what: Callable[[], None]) -> None:
    """Calls a function once, when the thread behind the training has copied some tensors."""
    copy, count = torch.Tensor.copy_, iter(range(3))

    def copies(target: Any, source: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and next(count, None) is None:
            torch.Tensor.copy_ = copy
            what()
        return copy(target, source)

    torch.Tensor.copy_ = copies


def dies_behind_the_training(folder: Path) -> None:
    """In the next save that overlaps with the training: the optimizer's next step waits, or is about to."""
    in_the_next_copy_behind_the_training(die)


def waits_behind_the_training(folder: Path) -> None:
    """In the next save that overlaps with the training: another rank fails meanwhile."""
    in_the_next_copy_behind_the_training(functools.partial(time.sleep, 1))


def dies_before_the_checksum(folder: Path) -> None:
    """In the next save, when all tensors are copied and the header is the one of an older step."""
    StateWriter.finish = lambda self, copied: die()


def dies_before_the_name(folder: Path) -> None:
    """In the next save, when the file is whole."""
    RankFiles.give_name = lambda self, file, name: die()


def flips_a_byte_and_dies(folder: Path) -> None:
    """In its own newest file."""
    BACKGROUND.wait()
    found = memory_files.complete_generations(path.name for path in folder.iterdir())
    (newest,) = folder.glob(f"step-{found[0].step}_rank-{dist.get_rank()}-*")
    with newest.open("r+b") as file:
        file.seek(newest.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    die()


def fails_to_name_a_file_once(folder: Path) -> None:
    """In the next save, behind the training."""
    give_name = RankFiles.give_name

    def fail(self: Any, file: Any, name: Any) -> None:
        RankFiles.give_name = give_name
        raise OSError("on purpose")

    RankFiles.give_name = fail


def waits_while_it_copies(folder: Path) -> None:
    """In the next save, until something interrupts it."""
    copy, count = torch.Tensor.copy_, iter(range(5))

    def wait(target: Any, source: Any) -> Any:
        if next(count, None) is not None:
            return copy(target, source)
        torch.Tensor.copy_ = copy
        while True:
            time.sleep(0.01)

    torch.Tensor.copy_ = wait


def waits_for_the_test(folder: Path) -> None:
    """Until the test has seen what it wants to see. The last save has its name before."""
    BACKGROUND.wait()
    while not Path(sys.argv[-1], GO_FILE).exists():
        time.sleep(0.01)


def fails(folder: Path) -> None:
    raise RuntimeError("on purpose")


def waits_for_the_end(folder: Path) -> None:
    """Once the last save of all ranks has its name."""
    BACKGROUND.wait()
    dist.barrier()
    (Path(sys.argv[-1]) / f"waits-{dist.get_rank()}").touch()
    time.sleep(600)


def raises(folder: Path) -> None:
    raise ValueError("on purpose")


def asks_for_other_hardware(folder: Path) -> None:
    """As the ranks do whose result is in doubt (`ft_client.rerun`): once the last save of all ranks has its name."""
    BACKGROUND.wait()
    dist.barrier()
    os._exit(ExitCode.RESUME_TO_DISAMBIGUATE)


def spoils_the_weights(folder: Path) -> None:
    """As a passing fault of a device may do. Of each model of this process, of which there is one at this time."""
    for found in gc.get_objects():
        if isinstance(found, torch.nn.Linear):
            found.weight.data.fill_(torch.nan)


def print_loss(step: int, loss: Any) -> None:
    """Prints what nanoGPT does. The launcher ends the ranks for a loss of NaN, for which this waits, once the last save
    of all ranks has its name."""
    loss = loss.item()
    if math.isnan(loss):
        BACKGROUND.wait()
        dist.barrier()
    if dist.get_rank() == 0:
        print(f"iter {step}: loss {loss}, time 50.00ms, mfu 1.00%", flush=True)
    if math.isnan(loss):
        time.sleep(600)


def run(plan: dict[str, Any], out: Path, cycle: int) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    folder = Path(json.loads(os.environ[env.MEMORY_FILES])["folder"])

    def after_step(step: int) -> None:
        for at_cycle, at_step, ranks, what in plan["faults"]:
            if at_cycle in (cycle, -1) and at_step == step and rank in ranks:
                globals()[what](folder)

    start, model = training(plan, True, after_step)
    _, expected = training(plan, False, lambda step: None)
    OUTLIVE_THE_GROUP.extend([model, expected])
    same = all(torch.equal(one, other) for one, other in zip(weights(model), weights(expected), strict=True))
    BACKGROUND.wait()
    sizes = [file.stat().st_size for file in folder.glob(f"step-*_rank-{rank}-*")]
    (out / f"end-{rank}").write_text(json.dumps({"start": start, "same": same, "sizes": sizes}))
    dist.destroy_process_group()


def main() -> None:
    out = Path(sys.argv[-1])
    plan = json.loads((out / PLAN_FILE).read_text())
    cycle = int(os.environ[env.CYCLE])
    if not plan.get("in_process"):
        run(plan, out, cycle)
        return
    second = datetime.timedelta(seconds=1)

    @Wrapper(soft_timeout=30 * second, hard_timeout=60 * second)
    def call(call_wrapper: Any = None) -> None:
        run(plan, out, call_wrapper.iteration)

    call()


if __name__ == "__main__":
    main()
