"""Real ranks for tests: processes with a gloo group, forked from one that has torch loaded, each running a function."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.patience import patient

DEADLINE_S = patient(120.0)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.client.straggler.rank_parts"])


@dataclass(frozen=True)
class Ended:
    """What a rank returned (None when it raised or left), and its exit code."""

    result: Any
    code: int | None


def run_ranks(function: Callable[..., Any], folder: Path, *arguments: Any, world: int = 4) -> list[Ended]:
    """Runs `function(rank, *arguments)` on all ranks; no process is left, whatever happens."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks, readers = [], []
    try:
        for rank in range(world):
            reader, writer = _context.Pipe(duplex=False)
            process = _context.Process(target=_rank, args=(function, rank, world, folder / "store", writer, arguments))
            process.start()
            writer.close()
            ranks.append(process)
            readers.append(reader)
        deadline = time.monotonic() + DEADLINE_S
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        alive = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        assert not alive, f"ranks {alive} did not end within {DEADLINE_S} s"
        return [
            Ended(reader.recv() if reader.poll() and process.exitcode == 0 else None, process.exitcode)
            for reader, process in zip(readers, ranks, strict=True)
        ]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def results(function: Callable[..., Any], folder: Path, *arguments: Any, world: int = 4) -> list[Any]:
    """What each rank returned; all must end well."""
    ended = run_ranks(function, folder, *arguments, world=world)
    assert [one.code for one in ended] == [0] * world
    return [one.result for one in ended]


def _rank(
    function: Callable[..., Any], rank: int, world: int, store: Path, writer: Connection, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    make_group(rank, world, store)
    writer.send(function(rank, *arguments))
    dist.barrier()
    # Without the end of the group: torch 2.6 ends it with the GIL held, and waits for a thread of the last collective,
    # which needs the GIL to free its tensor.
    os._exit(0)


def make_group(rank: int, world: int, store: Path) -> None:
    """The default group, over a file."""
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60))
