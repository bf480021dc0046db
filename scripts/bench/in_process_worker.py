"""What every rank of P8 and P9 runs: a wrapped function, called again in the same process after an exception.

Which package's wrapper it is comes from the environment; ours and NVIDIA's take the same arguments. Its trainer makes
a gloo group the way that package documents. Launchers run this by its path.
"""

from __future__ import annotations

import array
import importlib
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from worker import FOLDER, GIVE_UP_S, RANK, WORLD, stamp, time_calls, wait_for

PACKAGE = os.environ["BENCH_CLIENT"]
OURS = PACKAGE.startswith("ft_client")
LOOP_S, LOOPS_A_PING = 0.001, 100
STEP_ITEMS = 20_000


def arguments(settings: str) -> dict[str, timedelta]:
    """Of the wrapper: none, or what makes it quickest; NVIDIA's looks for a fault at intervals."""
    if settings == "default":
        return {}
    if OURS:
        return {"last_call_wait": timedelta(0)}
    quick = timedelta(milliseconds=1)
    return dict(last_call_wait=timedelta(0), monitor_thread_interval=quick, monitor_process_interval=quick)


def wrap(function: Callable[[Any], None], settings: str) -> Callable[[], None]:
    """The function, wrapped; its parameter becomes the call wrapper."""
    package = importlib.import_module(PACKAGE)
    function.__annotations__ = {"call": package.CallWrapper}
    wrapped: Callable[[], None] = package.Wrapper(**arguments(settings))(function)
    return wrapped


def trainers_store() -> Any:
    """NVIDIA's wrapper leaves the trainer a store of its own to make, once; ours gives each iteration a fresh one."""
    port = int(os.environ["MASTER_PORT"]) + 2
    return dist.TCPStore("127.0.0.1", port, WORLD, RANK == 0, wait_for_workers=True, multi_tenant=True)


def restart(settings: str, group: str, restarts: int) -> None:
    """P8: each iteration, another rank raises, when all others are in a loop of short steps.

    Args:
        group: "none"; "gloo": a group is made first; "ddp": a group, and the first step of a DDP model, and of another.
    """
    store = None
    if group != "none" and not OURS:
        store = trainers_store()

    def train(call: Any = None) -> None:
        iteration = call.iteration
        stamp("enter", iteration)
        if group != "none":
            make_group(call, store)
            stamp("ready", iteration)
        if group == "ddp":
            take_first_step()
            stamp("stepped", iteration)
            take_first_step()
            stamp("stepped again", iteration)
        if iteration == restarts:
            return
        if iteration % WORLD == RANK:
            wait_for(f"go.{iteration}")
            if settings == "default":
                time.sleep(random.uniform(0.5, 1.5))
            else:
                time.sleep(random.uniform(0.2, 0.4))
            stamp("raise", iteration)
            raise RuntimeError("a fault for the benchmark")
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline:
            call.ping()
            for _ in range(LOOPS_A_PING):
                time.sleep(LOOP_S)

    wrap(train, settings)()


def make_group(call: Any, store: Any) -> None:
    """A new gloo group of the ranks of this iteration."""
    timeout = timedelta(seconds=60)
    if store is None:
        dist.init_process_group("gloo", timeout=timeout)
        return
    own = dist.PrefixStore(str(call.iteration), store)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timeout)


def take_first_step() -> None:
    """Make a DDP model and take its first step."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()


def steady(steps: int) -> None:
    """P9: a function that nothing happens to; rank 0 times steps of work before it and in it."""
    if RANK == 0:
        (FOLDER / "port").write_text(os.environ["MASTER_PORT"])

    def step() -> None:
        sum(range(STEP_ITEMS))

    def train(call: Any = None) -> None:
        stamp("enter")
        wait_for("step")
        if RANK == 0:
            time_steps("wrapped", step, steps)
            time_calls("ping", call.ping, steps)
            stamp("timed")
        wait_for("end", every_s=0.25)

    if RANK == 0:
        time_steps("bare", step, steps)
    stamp("before")
    wrapped = wrap(train, "default")
    wait_for("go")
    stamp("call")
    wrapped()


def time_steps(name: str, step: Callable[[], object], steps: int) -> None:
    """The time of each step, and the CPU time that this process spent meanwhile."""
    before_ns = time.process_time_ns()
    time_calls(f"{name}_step", step, steps)
    spent_ns = array.array("q", [time.process_time_ns() - before_ns])
    (FOLDER / f"{name}_cpu.{RANK}.bin").write_bytes(spent_ns.tobytes())


def main() -> None:
    """Run the part named by the first argument."""
    mode, *given = sys.argv[1:]
    if mode == "restart":
        restart(given[0], given[1], int(given[2]))
    else:
        steady(int(given[0]))


if __name__ == "__main__":
    main()
