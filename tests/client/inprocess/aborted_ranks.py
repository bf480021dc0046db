"""Real ranks over gloo whose main threads are blocked and then freed: `aborted_ranks.py WORLD ROUNDS OPERATION...`.

Forks the ranks once for each operation. In each round they make a group, the last rank never takes part in the
operation, an abort runs on all of them, what it aborted is let go, and the next round shows that a group can be made
again. Each rank writes one line of JSON: the operation, what its main thread met in each round, and its threads and
descriptors after each.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft_client.inprocess import gloo_connections
from ft_client.inprocess.abort import AbortTorchDistributed, reset_groups
from ft_client.inprocess.state import State
from ft_client.rank.agreement.group import max_over_ranks

LONG = timedelta(seconds=300)
LOST_AFTER_S = 300.0
STILL_S = 0.05
AGAIN_S = 1.0
LOOK_AGAIN_S = 0.005
CALLBACK_LOOKS = 2000
TINY = torch.ones(4)
SECOND: list[Any] = []
OUTLIVING: list[Any] = []
ENDS = threading.Event()


def ddp() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    while True:
        model(TINY).sum().backward()


def callback() -> None:
    """The main thread is freed while a thread of the group is in a callback, which lasts until the group is ended."""

    def until_the_group_ends(_: object) -> None:
        for _ in range(CALLBACK_LOOKS):
            if any(thread.name.startswith("end of group") for thread in threading.enumerate()):
                break
            time.sleep(LOOK_AGAIN_S)
        for _ in range(5):
            time.sleep(LOOK_AGAIN_S)  # each time the thread needs the GIL again

    dist.all_reduce(TINY, async_op=True).get_future().then(until_the_group_ends)
    dist.all_reduce(torch.ones(4))


def outlived() -> None:
    """As `callback`, but the group is held by somebody else as well, like a model that lives on, and ends with that."""

    def until_the_group_ends(_: object) -> None:
        ENDS.wait(CALLBACK_LOOKS * LOOK_AGAIN_S)
        for _ in range(5):
            time.sleep(LOOK_AGAIN_S)

    ENDS.clear()
    OUTLIVING.append(dist.group.WORLD)
    dist.all_reduce(TINY, async_op=True).get_future().then(until_the_group_ends)
    dist.all_reduce(torch.ones(4))


def last() -> int:
    return dist.get_world_size() - 1


OPERATIONS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(TINY),
    "asynchronous": lambda: dist.all_reduce(TINY, async_op=True).wait(),
    "callback": callback,
    "outlived": outlived,
    "barrier": dist.barrier,
    "broadcast": lambda: dist.broadcast(TINY, src=last()),
    "objects": lambda: dist.broadcast_object_list([None], src=last()),
    "gather": lambda: dist.all_gather([torch.empty(4) for _ in range(last() + 1)], TINY),
    "recv": lambda: dist.recv(torch.empty(4), src=last()),
    "send": lambda: dist.send(torch.ones(10_000_000), dst=last()),
    "second group": lambda: dist.all_reduce(TINY, group=SECOND[-1]),
    "new group": lambda: dist.new_group(list(range(last() + 1))),
    "monitored": lambda: dist.monitored_barrier(timeout=LONG),
    "agreement": lambda: max_over_ranks([1.0]),
    "ddp": ddp,
    "init": lambda: dist.init_process_group("gloo", timeout=LONG),
}


def blocked(thread: int) -> bool:
    """Whether the main thread stays in one system call."""
    seen = set()
    for _ in range(5):
        seen.add(Path(f"/proc/self/task/{thread}/syscall").read_text())
        time.sleep(STILL_S / 5)
    return len(seen) == 1 and "running" not in next(iter(seen))


def entries(folder: str) -> int:
    return len(list(Path(folder).iterdir()))


def threads() -> int:
    """Those that stay: one that has just ended is seen a moment longer."""
    looks = []
    for _ in range(5):
        time.sleep(STILL_S / 5)
        looks.append(entries("/proc/self/task"))
    return min(looks)


class Rank:
    """One rank and its rounds."""

    def __init__(self, rank: int, world: int, ports: Any, ready: Any) -> None:
        self.rank, self.world, self.ports, self.ready = rank, world, ports, ready
        self.state = State(rank, world).freeze()
        self.met: list[str] = []
        self.counts: list[tuple[int, int]] = []

    def rounds(self, operation: str) -> None:
        for number in range(len(self.ports)):
            store = self.agree(number)
            if operation == "init":
                self.abort_here(operation)
                self.ready.wait()
                del store
                store = self.agree(number, again=True)
            dist.init_process_group("gloo", timeout=LONG)
            SECOND[:] = [dist.new_group(list(range(self.world)))]
            total = torch.ones(1)
            dist.all_reduce(total)
            dist.all_reduce(total, group=SECOND[-1])
            assert total.item() == self.world**2, total
            assert max_over_ranks([self.rank]) == [last()]
            if operation == "init":
                AbortTorchDistributed()(self.state)
            else:
                self.abort_here(operation)
            SECOND.clear()
            reset_groups()
            ENDS.set()
            OUTLIVING.clear()
            self.ready.wait()
            gloo_connections.close_cut()
            assert not dist.is_initialized()
            del store
            gc.collect()
            self.counts.append((threads(), entries("/proc/self/fd")))
        os.write(1, json.dumps([operation, self.rank, self.met, self.counts]).encode() + b"\n")  # in one piece

    def agree(self, number: int, again: bool = False) -> dist.TCPStore | None:
        """A fresh store server in rank 0, which all ranks know by the environment."""
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if self.rank == 0 else None
        if store is not None:
            self.ports[number] = store.port
        self.ready.wait()
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.world), MASTER_ADDR="127.0.0.1")
        os.environ.update(MASTER_PORT=str(self.ports[number]), TORCHELASTIC_USE_AGENT_STORE="True")
        self.ready.wait()
        return store

    def abort_here(self, operation: str) -> None:
        """Blocks the main thread, except the last rank's, and frees it from another thread."""
        main, freed, over = threading.get_native_id(), threading.Event(), threading.Event()

        def abort() -> None:
            while self.rank != self.world - 1 and not blocked(main):
                pass
            self.ready.wait()
            AbortTorchDistributed()(self.state)
            while not freed.wait(AGAIN_S):  # what stood still may have been a name that was looked up
                AbortTorchDistributed()(self.state)
            over.set()

        threading.Thread(target=abort, daemon=True).start()
        try:
            if self.rank != self.world - 1:
                OPERATIONS[operation]()
                self.met.append("came to its end")
        except RuntimeError as error:
            self.met.append(type(error).__name__)
        freed.set()
        over.wait()


def main() -> None:
    world, rounds = int(sys.argv[1]), int(sys.argv[2])
    fork = multiprocessing.get_context("fork")
    torch.set_num_threads(1)
    gc.freeze()  # the collections between rounds look at what is new
    for operation in sys.argv[3:]:
        ports, ready = fork.Array("i", [0] * rounds), fork.Barrier(world)

        def run(rank: int, ports: Any = ports, ready: Any = ready, operation: str = operation) -> None:
            faulthandler.dump_traceback_later(LOST_AFTER_S, exit=True)
            Rank(rank, world, ports, ready).rounds(operation)
            os._exit(0)

        ranks = [fork.Process(target=run, args=(rank,), daemon=True) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"{operation}: {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    main()
