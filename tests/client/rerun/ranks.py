"""Real ranks: processes of one process group of gloo that run functions when told to, and give back what these return.

They are forks of a server that has imported torch once. A rank that is alone has no process group.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.patience import patient

DEADLINE_S = patient(120.0)

Told = dict[str, Any]


class Ranks:
    """The ranks of one group, alive until `close`."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.world_size = world_size
        server = mp.get_context("forkserver")
        server.set_forkserver_preload(["torch.distributed", "tests.client.rerun.training"])
        self._ends, self._processes = [], []
        for rank in range(world_size):
            here, there = server.Pipe()
            process = server.Process(target=_rank, args=(there, f"file://{folder}/store", rank, world_size))
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def run(self, program: Callable[..., Told], **arguments: Any) -> list[Told]:
        """`program(rank, world_size, **arguments)` on every rank: what each returned, and its log as `lines`.

        A rank that raised fails the test with its traceback; these ranks cannot be used any more then.
        """
        for end in self._ends:
            end.send((program, arguments))
        told = []
        for rank, end in enumerate(self._ends):
            assert end.poll(DEADLINE_S), f"rank {rank} says nothing"
            answer = end.recv()
            assert isinstance(answer, dict), f"rank {rank}: {answer}"
            told.append(answer)
        return told

    def close(self) -> None:
        """Ends them."""
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()
            process.kill()
            process.join()
            process.close()


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _rank(orders: Connection, store: str, rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    lines = Lines()
    logging.getLogger("ft_client").addHandler(lines)
    logging.getLogger("ft_client").setLevel(logging.INFO)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    while True:
        program, arguments = orders.recv()
        lines.texts = []
        try:
            orders.send(program(rank, world_size, **arguments) | {"lines": lines.texts})
        except Exception:
            orders.send(traceback.format_exc())
