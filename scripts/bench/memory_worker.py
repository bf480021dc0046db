"""What the ranks of P17 run: saves of a state, a load of it in a new process, and a training that is killed.

The state is a model of FSDP2 and its AdamW, so many MiB on each rank. Each *way* to keep it is a class: ours, torch's
distributed checkpoint (DCP) and torch.save, and lm-resiliency's manager. The runner reads what the ranks write.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

RANK = int(os.environ["RANK"])
CYCLE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
FOLDER = Path(os.environ["BENCH_FOLDER"])
LAYERS = 8
BYTES_PER_PARAMETER = 12
"""Of AdamW in float32: the parameter and two moments."""
SAVES = 8
COPIES = 5
PASS_COPIES = 10
"""How long the forward and the backward pass take that a save overlaps with, in copies of the state. At 12 bytes for a
parameter and 18 GB/s that is less than 2 s for 300 million parameters, of which a pass on a CPU takes longer."""
STEP_S = 0.02
SAVED_EACH = 10
"""Steps from one save to the next in the training that is killed."""


class State:
    """A model and its optimizer, of about `mib` MiB on each rank."""

    def __init__(self, mib: int) -> None:
        width = int((mib * 2**20 * dist.get_world_size() / BYTES_PER_PARAMETER / LAYERS) ** 0.5)
        with torch.device("meta"):  # random weights would take longer than all that is measured
            self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.model.to_empty(device="cpu")
        for parameter in self.model.parameters():
            local(parameter).fill_(0.1)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.mib = mib

    def take_a_step(self) -> None:
        """Makes the moments of the optimizer."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[Any]:
        """The plain tensors of this rank."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [local(tensor) for tensor in (*self.model.parameters(), *moments)]


def local(tensor: Any) -> Any:
    """The plain tensor in a DTensor, and any other one itself."""
    if isinstance(tensor, DTensor):
        return tensor.detach().to_local()
    return tensor


class Way:
    """A way to keep a state. `folder`: where it may write."""

    def __init__(self, state: State, folder: Path) -> None:
        self._state = state
        self._folder = folder

    def begin(self) -> None:
        """Called before the first save."""

    def wait(self) -> None:
        """Waits until the save has ended."""

    def end(self) -> None:
        """Called after the last save."""


class Ours(Way):
    """ft.MemoryCheckpoint, under the launcher."""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        import ft_client as ft

        self._keep = ft.MemoryCheckpoint(model=state.model, optimizer=state.optimizer)

    def begin(self) -> None:
        self._keep.load()

    def save(self, step: int) -> None:
        self._keep.step(step)

    def wait(self) -> None:
        from ft_client.memory.background_work import BACKGROUND

        BACKGROUND.wait()

    def load(self) -> None:
        if not self._keep.load():
            sys.exit("nothing was loaded")


class OursOverlapped(Ours):
    """The same with saves that overlap with the training."""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        import ft_client as ft

        self._keep = ft.MemoryCheckpoint(model=state.model, optimizer=state.optimizer, overlap=True)


class Dcp(Way):
    """torch's distributed checkpoint. It is imported here: the training that is killed does without."""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import state_dict

        self._dcp = dcp
        self._torchs = state_dict

    def objects(self) -> dict[str, Any]:
        """The state as DCP takes it."""
        model, optimizer = self._torchs.get_state_dict(self._state.model, self._state.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, step: int) -> None:
        self._dcp.save(self.objects(), checkpoint_id=self._folder / str(step % 2))

    def load(self) -> None:
        found = self.objects()
        self._dcp.load(found, checkpoint_id=self._folder / str(SAVES % 2))
        self._torchs.set_state_dict(
            self._state.model,
            self._state.optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )


class DcpAsync(Dcp):
    """The same in a thread behind the training."""

    def save(self, step: int) -> None:
        self._future = self._dcp.async_save(self.objects(), checkpoint_id=self._folder / str(step % 2))

    def wait(self) -> None:
        self._future.result()  # type: ignore[union-attr]


class TorchSave(Way):
    """torch.save and torch.load, one file for each rank."""

    def save(self, step: int) -> None:
        torch.save(self._state.tensors(), self._folder / f"{RANK}.{step % 2}")

    def load(self) -> None:
        found = torch.load(self._folder / f"{RANK}.{SAVES % 2}", weights_only=True)
        put_back(self._state, found)


class LmResiliency(Way):
    """lm-resiliency's manager: copies in the rank's memory, with a buddy, and from there to files."""

    def begin(self) -> None:
        from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig

        config = InMemoryCkptConfig(
            disk_folder=str(self._folder), run_id="bench", verify_integrity=True, pin_memory=False
        )
        self._manager = InMemoryCheckpointManager(config)

    def save(self, step: int) -> None:
        self._manager.save_tensors(self._state.tensors(), step)
        self._manager.maybe_wait()  # the copy, which on a CPU may be a thread's: the state must not change before

    def wait(self) -> None:
        self._manager.finalize_replication()

    def end(self) -> None:
        self._manager.flush_for_restart()
        self._manager.close()

    def load(self) -> None:
        self.begin()
        found = self._manager.load_tensors("latest")  # what was not declared good by a rerun counts, too
        if found is None:
            sys.exit("nothing was loaded")
        put_back(self._state, found[0])


WAYS: dict[str, Callable[[State, Path], Any]] = {
    "ours": Ours,
    "ours-overlap": OursOverlapped,
    "dcp": Dcp,
    "dcp-async": DcpAsync,
    "torch-save": TorchSave,
    "lm-resiliency": LmResiliency,
}


def put_back(state: State, found: list[Any]) -> None:
    """Sets a state to plain tensors, in the order of `State.tensors`."""
    parameters = [local(parameter) for parameter in state.model.parameters()]
    with torch.no_grad():
        for target, source in zip(parameters, found, strict=False):
            target.copy_(source)
    moments = iter(found[len(parameters) :])
    for parameter in state.model.parameters():
        state.optimizer.state[parameter] = {name: next(moments) for name in ("step", "exp_avg", "exp_avg_sq")}


def one_copy_s(mib: int) -> float:
    """How long one copy of the state takes, from memory to memory that was used before."""
    source, target = torch.ones(mib, 2**18), torch.ones(mib, 2**18)
    took = []
    for _ in range(COPIES):
        began = time.perf_counter()
        target.copy_(source)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def note(**values: Any) -> None:
    """Writes what this rank has measured."""
    (FOLDER / f"{os.environ['BENCH_PART']}.{RANK}.json").write_text(json.dumps(values))


def stamp(event: str) -> None:
    """Appends one line, as worker.py does."""
    line = {"event": event, "rank": RANK, "cycle": CYCLE, "pid": os.getpid(), "t": time.monotonic_ns()}
    descriptor = os.open(FOLDER / "stamps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, (json.dumps(line) + "\n").encode())
    os.close(descriptor)


def saves(way_of: Callable[[State, Path], Any], mib: int, folder: Path) -> None:
    """Saves several times. Each save is compared with copies right before it."""
    state = State(mib)
    state.take_a_step()
    way = way_of(state, folder)
    way.begin()
    took = []
    for step in range(1, SAVES + 1):
        one_s = one_copy_s(mib)
        gc.collect()
        dist.barrier()
        began = time.perf_counter()
        way.save(step)
        blocked_s = time.perf_counter() - began
        if isinstance(way, OursOverlapped):
            blocked_s += wait_of_next_step(state, one_s)
        took.append(blocked_s / one_s)
        way.wait()
        dist.barrier()
    way.end()
    note(first_save=took[0], save=statistics.median(took[3:]))


def wait_of_next_step(state: State, one_s: float) -> float:
    """Returns for how long the optimizer's next step waits for a copy behind the training (seconds).

    Before the step this computes for `PASS_COPIES` copies of the state, in place of a forward and a backward pass.
    """
    matrix = torch.ones(256, 256)
    until = time.perf_counter() + PASS_COPIES * one_s
    while time.perf_counter() < until:
        matrix @ matrix
    for parameter in state.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    began = time.perf_counter()
    # The hook of the saves comes before this one, as it was registered first.
    ends: list[float] = []
    hook = state.optimizer.register_step_pre_hook(lambda *_: ends.append(time.perf_counter()))
    state.optimizer.step()
    hook.remove()
    state.optimizer.zero_grad()
    return ends[0] - began


def load(way_of: Callable[[State, Path], Any], mib: int, folder: Path) -> None:
    """Loads once, in a new process."""
    state = State(mib)
    way = way_of(state, folder)
    one_s = one_copy_s(mib)
    dist.barrier()
    began = time.perf_counter()
    way.load()
    took = (time.perf_counter() - began) / one_s
    steps = 1
    if isinstance(way, OursOverlapped):  # one before each save
        steps = SAVES
    expected = 0.5 * (1 - 0.9**steps)
    moments = [local(value["exp_avg"]) for value in state.optimizer.state.values()]
    if not all(torch.allclose(moment, torch.tensor(expected)) for moment in moments):
        sys.exit("another state was loaded")
    note(load=took)


def train(mib: int) -> None:
    """Steps that wait, of a training whose state is saved now and then."""
    import ft_client as ft
    from ft_client.memory.background_work import BACKGROUND

    state = State(mib)
    stamp("made")
    keep = ft.MemoryCheckpoint(model=state.model, optimizer=state.optimizer)
    start = keep.load()
    stamp("loaded")
    if not start:
        state.take_a_step()
    for step in range(start + 1, 10**6):
        time.sleep(STEP_S)
        dist.barrier()
        if step == start + 1:
            stamp("stepped")
        keep.step(step)
        if step == start + 3 * SAVED_EACH:
            BACKGROUND.wait()
            dist.barrier()
            stamp("saved")


def main() -> None:
    """Runs the part named by the first argument."""
    stamp("start")
    part, way, mib, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    os.environ["BENCH_PART"] = part
    dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=120))
    if part == "train":
        train(mib)
    folder.mkdir(exist_ok=True)
    if CYCLE == 0 and part != "load":
        saves(WAYS[way], mib, folder)
        stamp("saved")
        if part == "killed":
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        os.environ["BENCH_PART"] = "load"
        load(WAYS[way], mib, folder)
        stamp("loaded")
    dist.destroy_process_group()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
