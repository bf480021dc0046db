"""What the two ranks of a process group of `test_agreed_load.py` run: one of the functions below, which the last
argument names.

The other arguments: the rank, and a file for the process group. The result is printed as JSON.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.nn.parallel import DistributedDataParallel

import ft_client as ft
from ft_client.memory import kept_state
from ft_client.memory.agreed_load import NotRestored
from ft_client.memory.background_work import BACKGROUND
from ft_client.memory.tensor_parts import CannotBeKept
from ft_client.rank.agreement import group, roll_call
from rank_monitor.contract import env, memory_files
from rank_monitor.contract.memory_files import MemoryFiles
from rank_monitor.contract.wire.json_record import read_record, write_record


class Loader:
    """Something with a state. On rank 1 it does not take some steps back."""

    def __init__(self, state: Any, refused: tuple[int, ...] = ()) -> None:
        self.state = state
        self._refused = refused

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        if state["step"] in self._refused and dist.get_rank() == 1:
            raise KeyError("another number of workers")
        self.state = state


def launcher_says(**fields: Any) -> None:
    """Changes what the launcher of this rank's node says."""
    before = read_record(MemoryFiles, os.environ[env.MEMORY_FILES])
    os.environ[env.MEMORY_FILES] = write_record(dataclasses.replace(before, **fields))


def folder() -> Path:
    return Path(read_record(MemoryFiles, os.environ[env.MEMORY_FILES]).folder)


def saved_steps() -> list[int]:
    BACKGROUND.wait()
    dist.barrier()
    return [found.step for found in memory_files.complete_generations(path.name for path in folder().iterdir())]


def is_in_order() -> bool:
    """Whether the next collective of the training is paired with itself on the other rank."""
    ones = torch.ones(3)
    dist.all_reduce(ones)
    return ones.tolist() == [2.0] * 3


def no_room_and_then_room(rank: int) -> Any:
    """The same object is loaded again, as in a restart in process."""
    if rank == 1:
        launcher_says(limit=1000)
    keep = ft.MemoryCheckpoint(loader=Loader({"step": 0}))
    keep.load()
    for step in (1, 2, 3):
        keep.step(step)
        assert is_in_order()
    left = [path.name for path in folder().glob("*.safetensors")] + [path.name for path in folder().glob("rank-*")]
    launcher_says(limit=1 << 30)
    start = keep.load()
    for step in (4, 5):
        keep.step(step)
        assert is_in_order()
    return {"left": left, "start": start, "steps": saved_steps()}


def a_folder_gets_no_name_on_one_node(rank: int) -> Any:
    """Each rank is a node of its own, and only one folder is kept."""
    launcher_says(keep=1)
    rename, steps = Path.rename, []

    def refuse(path: Path, target: Any) -> Path:
        raise OSError("on purpose")

    for step in (1, 2, 3):
        if rank == 1 and step == 2:
            Path.rename = refuse  # type: ignore[assignment, method-assign]
        with ft.memory_folder(step) as path:
            (path / "file").write_text("state")
        Path.rename = rename  # type: ignore[method-assign]
        assert is_in_order()
        latest = ft.latest_memory_folder()
        assert latest is not None
        found = memory_files.state_folder(latest.name)
        assert found is not None
        steps.append(found.step)
    assert len(list(folder().glob("*.folder*"))) == 1
    return {"steps": sorted(set(steps))}


def intervals(rank: int) -> Any:
    """The launchers of two nodes have different options."""
    keep = ft.MemoryCheckpoint(loader=Loader({"step": 0}))
    keep.load()
    for step in range(1, 8):
        keep.step(step)
        assert is_in_order()
    return saved_steps()


def different_steps(rank: int) -> Any:
    """The ranks have loaded different checkpoints from disk, so a save is due in different calls."""
    keep = ft.MemoryCheckpoint(loader=Loader({"step": 0}))
    keep.load()
    for step in range(1, 8):
        keep.step(step + rank)
        assert is_in_order()
    return saved_steps()


def refused_on_one(rank: int) -> Any:
    """The objects of one rank cannot be kept."""

    def refuse(name: str, kept: Any) -> None:
        raise CannotBeKept("its shards have no names")

    if rank == 1:
        kept_state.check_object = refuse
    keep = ft.MemoryCheckpoint(loader=Loader({"step": 0}))
    start = keep.load()
    for step in (1, 2):
        keep.step(step)
        assert is_in_order()
    return {"start": start, "steps": saved_steps()}


def another_release(rank: int) -> Any:
    if rank == 1:
        gather_json = group.gather_json
        group.gather_json = lambda offer: gather_json({**offer, "more": 1})
    return one_save(rank)


def one_save(rank: int) -> Any:
    keep = ft.MemoryCheckpoint(loader=Loader({"step": 0}))
    start = keep.load()
    keep.step(1)
    return {"start": start, "is_in_order": is_in_order()}


def load_on_rank_0_only(rank: int, limit_s: float = 3600.0, goes_on: bool = True) -> Any:
    """Rank 1 goes on without `load()`; in one case it never comes to `step()` either."""
    roll_call.limit_s = lambda timeout_s: limit_s
    keep = ft.MemoryCheckpoint(loader=Loader({"step": 0}))
    raised = ""
    if rank == 0:
        try:
            keep.load()
        except RuntimeError as problem:
            raised = str(problem)
    elif goes_on:
        keep.step(1)
    return {"raised": raised, "is_in_order": is_in_order()}


def load_on_rank_0_only_and_no_step(rank: int) -> Any:
    return load_on_rank_0_only(rank, limit_s=0.5, goes_on=False)


def late_with_a_store_of_its_own(rank: int) -> Any:
    """The program has made the group's store, whose timeout is shorter than that of the group; rank 1 comes later."""
    dist.destroy_process_group()
    store = dist.FileStore(f"{sys.argv[2]}-of-the-program", 2)
    store.set_timeout(datetime.timedelta(seconds=0.1))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=70))
    asked_of, limit_s = [], roll_call.limit_s

    def note(timeout_s: float) -> float:
        asked_of.append(timeout_s)
        return limit_s(timeout_s)

    roll_call.limit_s = note
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
    return {**one_save(rank), "asked_of": asked_of}


def steps_before_load(rank: int) -> Any:
    """On all ranks: a line says that nothing is saved before `load()`."""
    keep = ft.MemoryCheckpoint(loader=Loader({"step": 0}))
    for step in (1, 2):
        keep.step(step)
    start = keep.load()
    keep.step(3)
    return {"start": start, "steps": saved_steps()}


def one_of_two_groups(rank: int) -> Any:
    """The job has another default process group with the same ranks."""
    result = one_save(rank)
    with ft.memory_folder(1) as path:
        is_temporary = path.parent != folder()
    is_on = ft.memory_folder.is_on()
    assert ft.latest_memory_folder() is None
    return {**result, "is_on": is_on, "is_temporary": is_temporary, "files": [path.name for path in folder().iterdir()]}


def save_two() -> None:
    loader = Loader({})
    keep = ft.MemoryCheckpoint(loader=loader)
    keep.load()
    for step in (5, 6):
        loader.state = {"step": step}
        keep.step(step)
    BACKGROUND.wait()
    dist.barrier()


def refused_in_one_start(rank: int) -> Any:
    """In the second of three starts the launcher of rank 1 has no folder."""
    save_two()
    here = folder()
    if rank == 1:
        launcher_says(folder="", refused="/dev/shm is missing")
    starts = []
    for path in (None, here):
        if path is not None:
            launcher_says(folder=str(path), refused="")
        keep = ft.MemoryCheckpoint(loader=Loader({}))
        starts.append(keep.load())
        keep.step(7)
        assert is_in_order()
    return starts


def the_newest_is_refused(rank: int) -> Any:
    save_two()
    loader = Loader({}, refused=(6,))
    start = ft.MemoryCheckpoint(loader=loader).load()
    return {"start": start, "state": loader.state, "steps": saved_steps()}


def all_are_refused(rank: int) -> Any:
    save_two()
    raised = ""
    try:
        ft.MemoryCheckpoint(loader=Loader({}, refused=(5, 6))).load()
    except NotRestored as problem:
        raised = str(problem)
    assert is_in_order()
    return {"raised": raised, "next": ft.MemoryCheckpoint(loader=Loader({})).load()}


class Model(torch.nn.Module):
    """Two layers with equal shapes, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.second = torch.nn.Linear(4, 4, bias=False)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, data: Any) -> Any:
        return self.second(self.norm(self.first(data)))


def own_gradients(bucket: Any) -> Any:
    """What a hook of DDP does that takes no mean over the ranks, as that of local SGD between two averagings."""
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def replicas(rank: int, kind: str) -> tuple[Any, Any]:
    """A model in DDP and its optimizer, which differ by rank in a way."""
    torch.manual_seed(1)
    model = Model()
    if kind == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["second.weight"])
    parallel = DistributedDataParallel(model)
    if kind == "hook":
        parallel.register_comm_hook(None, lambda state, bucket: own_gradients(bucket))
    parameters = list(parallel.parameters())
    if kind == "own part":
        parameters = [model.first.weight, model.second.weight][rank : rank + 1]
    return parallel, torch.optim.AdamW(parameters, lr=0.1)


def train_one_step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


def values(model: Any, optimizer: Any) -> list[Any]:
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    return [value.detach().clone() for value in [*model.parameters(), *moments]]


def state_of_replicas(rank: int) -> Any:
    """Each rank gets its own state back, also where DDP's model is not the same on all ranks."""
    found = {}
    top = folder()
    for kind in ("the same", "ignored", "hook", "not averaged", "own part"):
        launcher_says(folder=str(top / kind))
        folder().mkdir(exist_ok=True)
        dist.barrier()
        model, optimizer = replicas(rank, kind)
        keep = ft.MemoryCheckpoint(model=model, optimizer=optimizer)
        keep.load()
        torch.manual_seed(100 + rank)
        for step in (1, 2):
            model.require_backward_grad_sync = kind != "not averaged"
            train_one_step(model, optimizer)
            keep.step(step)
        saved = saved_steps()
        before = values(model, optimizer)
        model, optimizer = replicas(rank, kind)
        start = ft.MemoryCheckpoint(model=model, optimizer=optimizer).load()
        same = all(torch.equal(*pair) for pair in zip(before, values(model, optimizer), strict=True))
        found[kind] = {"start": start, "saved": saved, "same": same, "tensors": tensors_in_own_file(rank, saved[0])}
    return found


def a_replica_that_fails_to_give_its_state(rank: int) -> Any:
    """Once on rank 1, while the states are compared."""
    model, optimizer = replicas(rank, "the same")
    failing = {1, 12}

    def fail(optimizer: Any) -> None:
        if step in failing and rank == 1:
            failing.discard(step)
            raise ValueError("on purpose")

    optimizer.register_state_dict_pre_hook(fail)
    keep = ft.MemoryCheckpoint(model=model, optimizer=optimizer)
    keep.load()
    saved = {}
    for step in range(1, 15):
        train_one_step(model, optimizer)
        keep.step(step)
        saved[step] = saved_steps()
    return {"saved": [saved[step] for step in (1, 11, 12, 13)], "failures": keep.failures}


def replicas_that_become_different(rank: int) -> Any:
    """From step 3 on each rank trains with its own gradients, as local SGD does after its first steps."""
    model, optimizer = replicas(rank, "late")
    keep = ft.MemoryCheckpoint(model=model, optimizer=optimizer)
    keep.load()
    torch.manual_seed(100 + rank)
    tensors = []
    for step in range(1, 5):
        model.require_backward_grad_sync = step < 3
        train_one_step(model, optimizer)
        keep.step(step)
        saved_steps()
        tensors.append(tensors_in_own_file(rank, step))
    before = values(model, optimizer)
    model, optimizer = replicas(rank, "late")
    start = ft.MemoryCheckpoint(model=model, optimizer=optimizer).load()
    same = all(torch.equal(*pair) for pair in zip(before, values(model, optimizer), strict=True))
    return {"start": start, "same": same, "tensors": tensors}


def tensors_in_own_file(rank: int, step: int) -> bool:
    """Whether this rank has written tensors itself."""
    (file,) = folder().glob(f"step-{step}_rank-{rank}-*")
    with safe_open(file, "pt") as content:
        names = list(content.keys())
    return any(name.startswith(("model.", "optimizer.")) for name in names)


def distributed_checkpoint(rank: int) -> Any:
    """torch's own, whose ranks wait for each other in the body."""
    import torch.distributed.checkpoint as dcp  # the other functions need not wait for it

    with ft.memory_folder(3) as path:
        dcp.save({"weight": torch.full((4,), 7.0)}, checkpoint_id=path)
    found = {"weight": torch.zeros(4)}
    dcp.load(found, checkpoint_id=ft.latest_memory_folder())
    return found["weight"].tolist()


def a_collective_body_fails(rank: int) -> Any:
    with ft.memory_folder(1) as path:
        (path / str(rank)).write_text("half")
        if rank == 1:
            raise RuntimeError("on purpose")
        dist.barrier()


def main() -> None:
    rank, store, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    found = globals()[what](rank)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
